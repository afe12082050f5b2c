"""The two profiles: every row of the table in both, what hardened refuses, what the start warns of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import ConfigError
from headrace_server import ServerSettings, create_app
from headrace_server.app import connection_limits
from headrace_server.security import profiles
from headrace_server.settings import from_environment
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

GOOD_KEY = "k" * profiles.MIN_KEY_LENGTH


@pytest.mark.parametrize("row", profiles.TABLE, ids=lambda row: row.name)
def test_each_row_in_each_profile(row: profiles.ProfileSetting) -> None:
    assert getattr(ServerSettings(), row.name) == row.compatible
    assert getattr(ServerSettings(hardened=True), row.name) == row.hardened


@pytest.mark.parametrize("row", profiles.TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("hardened", [False, True])
def test_each_row_is_its_own_flag(row: profiles.ProfileSetting, hardened: bool) -> None:
    other = row.compatible if hardened else row.hardened
    if row.name == "trust_request_chat_template":
        other = False
    changed = ServerSettings(**{"hardened": hardened, row.name: other})
    assert getattr(changed, row.name) == other
    for unchanged in profiles.TABLE:
        if unchanged.name != row.name:
            expected = unchanged.hardened if hardened else unchanged.compatible
            assert getattr(changed, unchanged.name) == expected


@pytest.mark.req("SEC-20")
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 2048), ({"max_connections": 100}, 50), ({"max_connections": 20}, 16),
        ({"max_connections": 3}, 0), ({"hardened": True}, 256),
        ({"hardened": True, "max_connections": 100}, 0), ({"max_connections_per_peer": 0}, 0),
        ({"max_connections_per_peer": 9, "hardened": True}, 9),
    ],
)  # fmt: skip
def test_one_peer_leaves_connections_to_others(settings: dict[str, Any], most: int) -> None:
    made = ServerSettings(**settings)
    assert profiles.connections_per_peer(made) == most
    assert connection_limits(made).most_per_peer == most


@pytest.mark.req("SEC-17")
def test_protected_metrics_need_a_key() -> None:
    with pytest.raises(ConfigError, match="protect_metrics") as caught:
        create_app(FakeEngine(), ServerSettings(protect_metrics=True))
    assert caught.value.field == "protect_metrics"
    create_app(FakeEngine(), ServerSettings(protect_metrics=True, api_key=("k",)))


@pytest.mark.req("SEC-20")
@pytest.mark.parametrize(
    ("model", "compatible", "hardened"),
    [
        ({"max_model_len": 2048}, (4 << 20) + (1 << 19), (4 << 20) + (1 << 19)),
        ({"max_model_len": 131_072}, 36 << 20, 16 << 20),
        ({"max_model_len": 1 << 20}, 64 << 20, 16 << 20),
        ({"max_model_len": 2048, "modalities": ("audio",)}, 64 << 20, 16 << 20),
        ({"max_model_len": 2048, "prompt_embeds": True}, 64 << 20, 16 << 20),
        ({"max_model_len": 448, "tasks": ("transcription",)}, 64 << 20, 16 << 20),
        (None, 64 << 20, 16 << 20),
    ],
)
def test_bodies_are_as_large_as_a_context_may_need(
    model: dict[str, Any] | None, compatible: int, hardened: int
) -> None:
    served = None if model is None else fake_served_model(**model)
    assert profiles.body_limit(ServerSettings(), served) == compatible
    assert profiles.body_limit(ServerSettings(hardened=True), served) == hardened
    for strict in (False, True):
        settings = ServerSettings(hardened=strict, max_body_bytes=99 << 20)
        assert profiles.body_limit(settings, served) == 99 << 20


@pytest.mark.req("SEC-18")
@pytest.mark.req("SEC-19")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dev_mode", True), ("trust_request_chat_template", True), ("allowed_origins", ("*",)),
        ("api_key", (GOOD_KEY,)), ("admin_api_key", (GOOD_KEY,)), ("api_key_scope", "v1"),
    ],
)  # fmt: skip
def test_hardened_refuses(name: str, value: Any) -> None:
    ServerSettings(**{name: value})
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**{name: value, "hardened": True})
    assert caught.value.field == name
    assert GOOD_KEY not in str(caught.value)


@pytest.mark.req("SEC-18")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "server.example"])
def test_hardened_needs_a_key_beyond_loopback(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        create_app(FakeEngine(), ServerSettings(host=host, hardened=True))
    assert caught.value.field == "host"
    create_app(FakeEngine(), ServerSettings(host=host))
    for local in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        create_app(FakeEngine(), ServerSettings(host=local, hardened=True))
    create_app(FakeEngine(), ServerSettings(host=host, uds=str(tmp_path / "s"), hardened=True))
    monkeypatch.setenv("HEADRACE_API_KEY", GOOD_KEY)
    create_app(FakeEngine(), ServerSettings(host=host, hardened=True))


@pytest.mark.req("SEC-19")
def test_hardened_refuses_short_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = GOOD_KEY[1:]
    monkeypatch.setenv("HEADRACE_API_KEY", short)
    create_app(FakeEngine(), ServerSettings())
    with pytest.raises(ConfigError) as caught:
        create_app(FakeEngine(), ServerSettings(hardened=True))
    assert short not in str(caught.value)
    monkeypatch.delenv("HEADRACE_API_KEY")
    file = tmp_path / "keys"
    file.write_text(f"name {short}\n")
    with pytest.raises(ConfigError, match="128 bits"):
        create_app(FakeEngine(), ServerSettings(hardened=True, api_key_file=str(file)))


async def test_strict_in_the_hardened_profile(connect: Any) -> None:
    body = {"prompt": "a", "temprature": 1}
    url = "http://localhost/v1/completions"
    assert (await connect(FakeEngine("x")).post(url, json=body)).status_code == 200
    answer = await connect(FakeEngine("x"), hardened=True).post(url, json=body)
    assert answer.status_code == 400
    assert "'temperature'" in answer.json()["error"]["message"]
    template = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}
    chat = "http://localhost/v1/chat/completions"
    answer = await connect(FakeEngine("x"), hardened=True).post(chat, json=template)
    assert answer.json()["error"]["param"] == "chat_template"


@pytest.mark.req("SEC-13")
async def test_limits_of_one_request(connect: Any) -> None:
    url, client = "http://localhost/v1/completions", connect(FakeEngine("x"), hardened=True)
    for field, value, most in (
        ("n", 17, 16), ("prompt", ["a"] * 257, 256), ("stop", ["a"] * 17, 16),
        ("bad_words", ["a"] * 257, 256),
    ):  # fmt: skip
        answer = await client.post(url, json={"prompt": "a", field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert str(most) in answer.json()["error"]["message"]
    tokens = {"prompt": [1] * 300, "n": 16, "temperature": 1}
    assert (await client.post(url, json=tokens)).status_code == 200
    assert (await connect(FakeEngine("x")).post(url, json={"prompt": "a", "n": 17})).is_success
    own = connect(FakeEngine("x"), hardened=True, request_limits={"n": 20})
    assert (await own.post(url, json={"prompt": "a", "n": 17, "temperature": 1})).is_success
    for wrong in ({"m": 1}, {"n": 0}, {"n": "2"}):
        with pytest.raises(ConfigError, match="request_limits"):
            ServerSettings(request_limits=wrong)


def test_one_block_of_warnings(caplog: pytest.LogCaptureFixture) -> None:
    def block(**settings: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "headrace_server"):
            create_app(FakeEngine(), ServerSettings(**settings))
        found = [r.getMessage() for r in caplog.records if "open settings" in r.getMessage()]
        assert len(found) <= 1
        return found[0].splitlines() if found else []

    assert block() == []
    assert block(hardened=True) == []
    lines = block(host="0.0.0.0")
    assert any("without a key" in line for line in lines)
    assert any("DNS rebinding" in line for line in lines)
    assert "--hardened" in lines[-1]
    assert not any("without a key" in line for line in block(host="0.0.0.0", api_key=("k",)))
    assert any("dev_mode" in line for line in block(dev_mode=True))
    assert any("v1" in line for line in block(api_key=("k",), api_key_scope="v1"))
    assert any("allowed_origins" in line for line in block(allowed_origins=("*",)))


def test_the_environment() -> None:
    assert from_environment({}) == {}
    assert from_environment({"HEADRACE_HARDENED": "0"}) == {}
    assert from_environment({"HEADRACE_HARDENED": "1", "HEADRACE_SERVER_DEV_MODE": "1"}) == {
        "hardened": True,
        "dev_mode": True,
    }
    with pytest.raises(ConfigError, match="HEADRACE_HARDENED"):
        from_environment({"HEADRACE_HARDENED": "yes please"})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"api_server_count": 0}, "api_server_count"),
        ({"enable_log_outputs": True}, "enable_log_outputs"),
        ({"enable_ssl_refresh": True}, "enable_ssl_refresh"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "otlp_traces_endpoint"),
        ({"admin_port": 8000}, "admin_port"),
        ({"admin_port": 70000}, "admin_port"),
        ({"header_timeout": 0.0}, "header_timeout"),
        ({"min_body_rate": -1}, "min_body_rate"),
        ({"max_connections": 0}, "max_connections"),
        ({"prefix_cache_scope": "mine"}, "prefix_cache_scope"),
        ({"log_format": "xml"}, "log_format"),
    ],
)
def test_refused_settings(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**settings)
    assert caught.value.field == field
