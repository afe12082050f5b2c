"""Keys: who needs one, on every route and in every spelling."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headrace_core.context import OWNER
from headrace_server import ServerSettings, create_app
from headrace_server.security.auth import KeyGate
from headrace_server.security.keys import Key, KeyRing, digest
from headrace_testing.fakes.engine import FakeEngine

pytestmark = pytest.mark.req("SEC-17")
OPEN = {"/health", "/livez", "/readyz", "/ping", "/version", "/metrics"}
KEY = {"Authorization": "Bearer canary-key"}


async def test_every_route_is_closed_but_the_open_ones(connect: Any) -> None:
    settings: dict[str, Any] = {"api_key": ("canary-key",), "enable_tokenizer_info_endpoint": True}
    client = connect(**settings)
    paths = create_app(FakeEngine(), ServerSettings(**settings)).state.headrace.paths
    assert paths >= OPEN
    assert {"/v1/models", "/tokenize", "/load", "/v1/completions"} <= paths
    for path in paths | {"/docs", "/docs/start.js", "/openapi.json", "/", "/nothing"}:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            answer = await client.request(method, path.replace("{name}", "x"))
            assert (answer.status_code == 401) == (path not in OPEN), (method, path)
            if answer.status_code == 401 and method != "HEAD":
                told = answer.json()["error"]  # an object on Anthropic's routes
                assert (told if isinstance(told, str) else told["message"]) == "Unauthorized"


@pytest.mark.parametrize(
    "path",
    ["//health", "/health/", "/health/../v1/models", "/HEALTH", "/%68ealth", "/health%2f",
     "/health;x", "/./health", "/v1/models/", "/V1/models", "/%76%31/models", "//v1/models",
     "/v1%2fmodels", "/health%00", "/metrics/", "/metrics%2F..%2Fv1%2Fmodels", "*"],
)  # fmt: skip
async def test_spellings(path: str) -> None:
    """The gate alone, with the path as it stands on the wire."""
    from urllib.parse import unquote

    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    gate = KeyGate(app, KeyRing([Key("k", digest(b"k"))]), "all", OPEN)
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": unquote(path), "raw_path": path.encode(),
        "headers": [],
    }  # fmt: skip
    await gate(scope, None, send)  # type: ignore[arg-type]
    assert reached == []
    assert sent[0]["status"] == 401


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("Bearer one", True), ("bearer two", True), ("BEARER  one", True), ("Bearer three", False),
        ("one", False), ("Basic one", False), ("Bearer", False), ("Bearer ", False),
        ("Bearer onetwo", False), ("Bearer o", False), ("", False),
    ],
)  # fmt: skip
@pytest.mark.req("SEC-19")
async def test_keys(connect: Any, value: str, good: bool) -> None:
    client = connect(api_key=("one", "two"))
    answer = await client.get("/v1/models", headers={"Authorization": value})
    assert answer.status_code == (200 if good else 401)


@pytest.mark.req("SEC-19")
async def test_two_authorization_headers_are_none(connect: Any) -> None:
    headers = [("Authorization", "Bearer one"), ("Authorization", "Bearer one")]
    answer = await connect(api_key=("one",)).get("/v1/models", headers=headers)
    assert answer.status_code == 401


async def test_protected_metrics(connect: Any) -> None:
    client = connect(api_key=("canary-key",), protect_metrics=True)
    assert (await client.get("/metrics")).status_code == 401
    assert (await client.get("/metrics", headers=KEY)).status_code == 200


async def test_protected_metrics_under_the_narrow_rule(connect: Any) -> None:
    client = connect(api_key=("canary-key",), protect_metrics=True, api_key_scope="v1")
    for path in ("/metrics", "/%6detrics"):
        assert (await client.get(path)).status_code == 401, path
        assert (await client.get(path, headers=KEY)).status_code == 200
    document = (await client.get("/openapi.json")).json()
    assert document["paths"]["/metrics"]["get"].get("security")


async def test_the_narrow_rule(connect: Any) -> None:
    client = connect(api_key=("canary-key",), api_key_scope="v1")
    assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
    for path in ("/v1/models", "/%76%31/models", "/v1", "/v1/nothing"):
        assert (await client.get(path)).status_code == 401, path
    assert (await client.options("/v1/models")).status_code != 401


async def test_root_path(connect: Any) -> None:
    client = connect(api_key=("canary-key",), root_path="/x")
    assert (await client.get("/x/v1/models")).status_code == 401
    assert (await client.get("/x/v1/models", headers=KEY)).status_code == 200
    assert (await client.get("/v1/models", headers=KEY)).status_code == 200
    assert (await client.get("/x/health")).status_code == 200
    assert (await client.get("/y/health")).status_code == 401
    assert (await client.get("/xhealth")).status_code == 401
    document = (await client.get("/x/openapi.json", headers=KEY)).json()
    assert document["servers"] == [{"url": "/x"}]


async def test_preflight_needs_no_key(connect: Any) -> None:
    client = connect(api_key=("canary-key",), allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = await client.options("/v1/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = {**headers, "Origin": "https://b.example"}
    answer = await client.options("/v1/completions", headers=other)
    assert "access-control-allow-origin" not in answer.headers


async def test_no_cors_by_default(connect: Any) -> None:
    answer = await connect().get("/v1/models", headers={"Origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.req("SEC-19")
@pytest.mark.req("SEC-25")
async def test_keys_are_not_logged(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client = connect(api_key=("canary-key",), enable_log_requests=True)
        await client.post("/v1/completions", json={"prompt": "a"}, headers=KEY)
        await client.get("/v1/models", headers={"Authorization": "Bearer canary-wrong"})
    assert "canary" not in caplog.text


@pytest.mark.req("REL-22")
async def test_whose_key_it_is_is_known_inside(connect: Any, tmp_path: Path) -> None:
    """The name, or a number; never the key."""
    seen = []

    class Recording(FakeEngine):
        def generate(self, *args: Any, **options: Any) -> Any:
            seen.append(OWNER.get())
            return super().generate(*args, **options)

    file = tmp_path / "keys"
    file.write_text("# ours\nbatch first-key\nsecond-key\n")
    client = connect(Recording(), api_key=("zeroth-key",), api_key_file=str(file))
    body = {"prompt": "x", "max_tokens": 1}
    for key in ("first-key", "second-key", "zeroth-key", "batch first-key"):
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == (401 if " " in key else 200)
    assert seen == ["batch", f"key-{digest(b'second-key').hex()[:16]}", "api_key-0"]
    assert OWNER.get() == ""


def test_listening_openly_without_a_key_warns(caplog: pytest.LogCaptureFixture) -> None:
    create_app(FakeEngine(), ServerSettings(host="0.0.0.0"))
    assert "without a key" in caplog.text
    caplog.clear()
    create_app(FakeEngine(), ServerSettings(host="0.0.0.0", api_key=("k",)))
    create_app(FakeEngine(), ServerSettings())
    assert "without a key" not in caplog.text
