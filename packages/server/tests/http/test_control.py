"""Control routes: where they exist, who may call them, what they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from headrace_core.engine import EngineStats
from headrace_core.errors import CapacityError, ConfigError, EngineAsleep, WeightsError
from headrace_server import ServerSettings, create_app
from headrace_server.http.paths import CONTROL_PATHS
from headrace_server.routes import control
from headrace_testing.fakes.engine import FakeEngine

KEY = {"Authorization": "Bearer canary-user"}
ADMIN = {"Authorization": "Bearer canary-admin"}
DEV_ONLY = {"/collective_rpc", "/server_info"}
ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
PROFILE = {"/start_profile", "/stop_profile"}


def profiled() -> FakeEngine:
    engine = FakeEngine("x")
    engine.profiles = []
    return engine


async def served(client: Any, headers: dict[str, str] | None = None) -> set[str]:
    """The control paths that exist."""
    found = set()
    for path in CONTROL_PATHS:
        for method in ("GET", "POST"):
            answer = await client.request(method, "http://localhost" + path, headers=headers or {})
            if answer.status_code not in (401, 404, 405):
                found.add(path)
    return found


@pytest.mark.req("SEC-18")
async def test_none_by_default(connect: Any) -> None:
    assert await served(connect()) == set()
    assert await served(connect(hardened=True)) == set()
    assert await served(connect(api_key=("canary-user",)), KEY) == set()


@pytest.mark.req("SEC-18")
async def test_switched_on(connect: Any) -> None:
    keyed: Any = {"api_key": ("canary-user",)}
    on = await served(connect(enable_control_routes=True, **keyed), KEY)
    assert on == CONTROL_PATHS - DEV_ONLY - ADAPTERS
    assert await served(connect(enable_control_routes=True, **keyed)) == set()
    assert await served(connect(dev_mode=True, **keyed), KEY) == CONTROL_PATHS - ADAPTERS
    assert await served(connect(dev_mode=True)) == CONTROL_PATHS - ADAPTERS
    assert await served(connect(profiled(), **keyed), KEY) == PROFILE
    assert await served(connect(profiled())) == set(), "without a key, only in dev mode"


@pytest.mark.req("SEC-18")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("dev_mode", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_never_without_a_key(host: str, dev_mode: bool, keyed: bool) -> None:
    settings = ServerSettings(
        host=host, dev_mode=dev_mode, enable_control_routes=True,
        api_key=("canary-user",) if keyed else (),
    )  # fmt: skip
    if keyed or (dev_mode and host == "127.0.0.1"):
        create_app(FakeEngine(), settings)
    else:
        with pytest.raises(ConfigError) as caught:
            create_app(FakeEngine(), settings)
        assert caught.value.field == "enable_control_routes"


@pytest.mark.req("SEC-18")
async def test_without_a_key_pages_are_kept_out(connect: Any) -> None:
    client = connect(dev_mode=True)
    for headers, status in (
        ({"Host": "localhost"}, 200), ({"Host": "evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
    ):  # fmt: skip
        assert (await client.post("/resume", headers=headers)).status_code == status


@pytest.mark.req("SEC-17")
@pytest.mark.parametrize("scope", ["all", "v1"])
async def test_their_own_key(connect: Any, scope: str) -> None:
    client = connect(
        dev_mode=True, api_key=("canary-user",), admin_api_key=("canary-admin",),
        api_key_scope=scope, enable_tokenizer_info_endpoint=True,
    )  # fmt: skip
    for path in CONTROL_PATHS:
        for spelling in (path, path.upper(), path + "/", path + "%2f", path.replace("_", "%5f")):
            for headers in ({}, KEY):
                for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD"):
                    answer = await client.request(method, spelling, headers=headers)
                    assert answer.status_code in (401, 404, 405), (method, spelling)
                    assert answer.status_code == 401 or spelling != path
    assert await served(client, ADMIN) == CONTROL_PATHS - ADAPTERS
    assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401
    assert (await client.get("/v1/models", headers=KEY)).status_code == 200


@pytest.mark.req("SEC-18")
async def test_only_an_admin_key(connect: Any) -> None:
    client = connect(enable_control_routes=True, admin_api_key=("canary-admin",))
    assert (await client.post("/resume")).status_code == 401
    assert (await client.post("/resume", headers=ADMIN)).status_code == 200
    assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.req("SEC-18")
async def test_admin_port(live: Any, until: Any) -> None:
    settings: Any = {"admin_port": 0, "api_key": ("canary-user",), "dev_mode": True}
    server = await live(FakeEngine("x"), **settings, admin_api_key=("canary-admin",))
    async with httpx2.AsyncClient() as client:
        for path in CONTROL_PATHS:
            answer = await client.post(server.url + path, headers=KEY)
            assert answer.status_code == 404, "the public listener has none of them"
        admin = server.admin_url
        assert (await client.post(admin + "/resume")).status_code == 401
        assert (await client.post(admin + "/resume", headers=KEY)).status_code == 401
        assert (await client.post(admin + "/resume", headers=ADMIN)).status_code == 200
        for path in ("/v1/models", "/health", "/docs", "/openapi.json", "/metrics", "/"):
            assert (await client.get(admin + path, headers=ADMIN)).status_code == 404, path
        evil = {**ADMIN, "Host": "evil.example"}
        assert (await client.post(admin + "/resume", headers=evil)).status_code == 403
    server.state.lifecycle.begin_drain()
    assert await asyncio.wait_for(server.task, 60) == 0
    with pytest.raises(httpx2.TransportError):
        async with httpx2.AsyncClient() as client:
            await client.post(admin + "/resume", headers=ADMIN)


async def test_pause_aborts_or_waits(connect: Any, until: Any) -> None:
    engine = FakeEngine("x" * 200, delay=0.005)
    client = connect(engine, dev_mode=True)
    base = "http://localhost"
    body = {"prompt": "a", "max_tokens": 150}

    async def ask() -> Any:
        return (await client.post(base + "/v1/completions", json=body)).json()

    running = asyncio.create_task(ask())
    await until(lambda: engine.num_running == 1)
    assert (await client.post(base + "/pause")).status_code == 200
    assert engine.num_running == 0
    assert engine.num_cache_resets == 1
    assert (await running)["choices"][0]["finish_reason"] == "abort"
    assert (await client.get(base + "/is_paused")).json() == {"is_paused": True}
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["reasons"][0].startswith("paused")

    held = asyncio.create_task(ask())
    for _ in range(5):  # a request that is not held would be through
        await client.get("/health")
    assert not held.done()
    assert engine.num_running == 0
    await client.post(base + "/resume")
    await until(lambda: engine.num_running == 1)
    waits = {"wait_for_inflight_requests": "true", "clear_cache": "false"}
    assert (await client.post(base + "/pause", params=waits)).status_code == 200
    assert (await held)["choices"][0]["finish_reason"] == "length"
    assert engine.num_cache_resets == 1
    await client.post(base + "/resume")
    assert (await client.get("/readyz")).status_code == 200


async def test_cache_reset(connect: Any, until: Any) -> None:
    gate = asyncio.Event()
    engine = FakeEngine("x", gate=gate)
    client = connect(engine, dev_mode=True)
    url = "http://localhost/reset_prefix_cache"
    assert (await client.post(url)).status_code == 200
    running = asyncio.create_task(
        client.post("http://localhost/v1/completions", json={"prompt": "a"})
    )
    await until(lambda: engine.num_running == 1)
    assert (await client.post(url)).status_code == 409
    assert (await client.post(url + "?reset_running_requests=true")).status_code == 200
    assert engine.num_cache_resets == 2
    refused = await client.post(url + "?reset_external=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_external")
    assert (await client.post(url + "?reset_running_requests=maybe")).status_code == 400
    assert (await client.post("http://localhost/reset_mm_cache")).status_code == 400
    gate.set()
    await running


async def test_profile(connect: Any) -> None:
    engine = profiled()
    client = connect(engine, dev_mode=True)
    for path in ("/start_profile", "/stop_profile"):
        assert (await client.post("http://localhost" + path)).status_code == 200
    assert engine.profiles == ["start", "stop"]
    client = connect(dev_mode=True)
    answer = await client.post("http://localhost/start_profile")
    assert answer.status_code == 400
    assert "profiler" in answer.json()["error"]["message"]


async def test_workers_that_give_no_answer(connect: Any) -> None:
    class Late(FakeEngine):
        async def collective_rpc(self, *args: Any, **options: Any) -> list[Any]:
            raise TimeoutError

    client = connect(Late(), dev_mode=True)
    for timeout, said in ((2.5, "in 2.5 s"), (None, "in time")):
        body = {"method": "report", "timeout": timeout}
        answer = await client.post("http://localhost/collective_rpc", json=body)
        assert answer.status_code == 504
        message = answer.json()["error"]["message"]
        assert message == f"collective_rpc: report: no answer from the workers {said}"


async def test_calls_of_workers(connect: Any) -> None:
    client = connect(dev_mode=True)
    url = "http://localhost/collective_rpc"
    answer = await client.post(url, json={"method": "report"})
    assert answer.json() == {"results": [{"rank": 0}]}
    for body, param in (
        ({"method": "close"}, "method"), ({"method": "__init__"}, "method"), ({}, "method"),
        ({"method": "report", "kwargs": {"a": 1}}, "kwargs"),
        ({"method": "report", "timeout": -1}, "timeout"),
        ({"method": "report", "more": 1}, "more"),
    ):  # fmt: skip
        answer = await client.post(url, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_server_info_shows_no_secret(
    connect: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "keys"
    file.write_text("name canary-file\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "canary-environment")
    monkeypatch.setenv("HEADRACE_HF_TOKEN", "canary-token")
    monkeypatch.setenv("HEADRACE_LOGGING_LEVEL", "INFO")
    client = connect(
        dev_mode=True, api_key=("canary-user",), admin_api_key=("canary-admin",),
        api_key_file=str(file),
    )  # fmt: skip
    for form in ("text", "json"):
        answer = await client.get(f"/server_info?config_format={form}", headers=ADMIN)
        assert answer.status_code == 200
        assert "canary" not in answer.text
        assert "max_body_bytes" in answer.text
        assert "HEADRACE_LOGGING_LEVEL" in answer.text
    info = json.loads(answer.text)
    assert info["server"]["port"] == 8000
    assert (await client.get("/server_info?config_format=xml", headers=ADMIN)).status_code == 400


async def test_what_is_not_served_says_so(connect: Any) -> None:
    client = connect(dev_mode=True)
    for path, (method, reason) in control.NOT_SERVED.items():
        answer = await client.request(method, "http://localhost" + path)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, reason)


class Sleeper(FakeEngine):
    """Notes what its workers are told; asleep, it refuses requests."""

    def __init__(self) -> None:
        super().__init__("x")
        self.told: list[tuple[str, list[Any]]] = []
        self.level = 0

    async def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        self.told.append((method, list(args)))
        return [bool(self.level)]

    async def stats(self, *, drain: bool = False) -> EngineStats:
        return replace(await super().stats(drain=drain), sleep_level=self.level)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineAsleep("the engine sleeps: wake_up() comes first")
        yield


async def test_sleep(connect: Any) -> None:
    engine = Sleeper()
    client, base = connect(engine, dev_mode=True), "http://localhost"
    for path in ("/sleep", "/sleep?level=2", "/wake_up", "/wake_up?tags=weights&tags=kv_cache"):
        answer = await client.post(base + path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert engine.told == [
        ("sleep", [1]), ("sleep", [2]), ("wake_up", [None]), ("wake_up", [["weights", "kv_cache"]]),
    ]  # fmt: skip
    assert (await client.post(base + "/sleep?level=deep")).status_code == 400
    assert (await client.get(base + "/is_sleeping")).json() == {"is_sleeping": False}
    assert 'engine_sleep_state{engine="0",model_name="fake-model",sleep_state="awake"} 1.0' in (
        (await client.get("http://localhost/metrics")).text
    )


async def test_a_misspelt_query_parameter_is_refused_by_every_control_route(connect: Any) -> None:
    engine = Sleeper()
    client, base = connect(engine, dev_mode=True), "http://localhost"
    answer = await client.post(base + "/sleep?levle=2")
    told = answer.json()["error"]
    assert (answer.status_code, told["param"]) == (400, "levle")
    assert told["message"] == "query parameter 'levle': must be one of level, model for /sleep"
    assert (await client.post(base + "/wake_up?tag=weights")).status_code == 400
    answer = await client.post(base + "/sleep?level=1&level=2")
    assert answer.json()["error"]["message"] == (
        "query parameter 'level': must be given once for /sleep, is given 2 times"
    )
    assert engine.told == [], "nothing was done"
    asked = set()
    for path in CONTROL_PATHS - ADAPTERS:
        for method in ("GET", "POST"):
            body = {"json": {"method": "report"}} if method == "POST" else {}
            refused = await client.request(method, f"{base}{path}?levle=2", **body)
            if refused.status_code not in (404, 405):
                assert refused.json()["error"]["param"] == "levle", path
                asked.add(path)
    assert asked == CONTROL_PATHS - ADAPTERS
    assert (await client.post(base + "/sleep?level=1&model=fake-model")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [("/wake_up", None), ("/collective_rpc", {"method": "reload_weights"})],
)
async def test_weights_that_cannot_be_had(connect: Any, path: str, body: Any) -> None:
    """Whoever steers the server is told why; of other faults only the log says more."""

    class Failing(Sleeper):
        error: Exception = WeightsError("/models/a: no weights found")

        async def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
            raise self.error

    engine = Failing()
    client = connect(engine, dev_mode=True)
    for error, told in (
        (engine.error, "/models/a: no weights found"),
        (CapacityError("the model's weights need 3 GiB"), "the model's weights need 3 GiB"),
        (ValueError("a secret"), "internal error; the server's log has the details"),
    ):
        engine.error = error
        answer = await client.post("http://localhost" + path, json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, told)


@pytest.mark.parametrize(("level", "state"), [(1, "weights_offloaded"), (2, "discard_all")])
async def test_asleep(connect: Any, level: int, state: str) -> None:
    engine = Sleeper()
    engine.level = level
    client = connect(engine, dev_mode=True)
    assert (await client.get("http://localhost/is_sleeping")).json() == {"is_sleeping": True}
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/readyz")).json()["reasons"][0].startswith("asleep: ")
    assert (await client.post("http://localhost/pause")).status_code == 200
    both = (await client.get("/readyz")).json()["reasons"]
    assert [reason.partition(":")[0] for reason in both] == ["paused", "asleep"]
    assert (await client.post("http://localhost/resume")).status_code == 200
    metrics = (await client.get("http://localhost/metrics")).text
    assert f'sleep_state="{state}"}} 1.0' in metrics
    assert 'sleep_state="awake"} 0.0' in metrics
    for stream in (False, True):
        body = {"prompt": "a", "stream": stream}
        refused = await client.post("http://localhost/v1/completions", json=body)
        told = refused.json()["error"]
        assert (refused.status_code, told["headrace_code"]) == (503, "HR-ENG-003")
        assert told["message"] == "the engine sleeps: wake_up() comes first"
