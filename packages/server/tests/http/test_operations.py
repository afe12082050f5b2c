"""Small operations: invocations, load reports, health that tells the truth, certificates, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace_core.engine import EngineStats
from headrace_core.errors import AddressError, EngineDead
from headrace_server import ServerSettings, bind, create_app, serve
from headrace_server.http.paths import CONTROL_PATHS
from headrace_server.observability import metrics
from headrace_server.routes import control, invocations, lora
from headrace_server.run import address, bind_admin
from headrace_server.security import tls
from headrace_testing.fakes.engine import FakeEngine, fake_served_model
from headrace_testing.fakes.pooling import fake_pooling_model


class Stuck(FakeEngine):
    """Alive, but makes no progress and answers nothing."""

    async def check_health(self) -> None:
        raise EngineDead("the engine has made no progress for 7.0 s (limit 5 s)")

    async def stats(self, *, drain: bool = False) -> EngineStats:
        await asyncio.Event().wait()  # until it is cancelled
        return EngineStats()


@pytest.mark.req("REL-02")
async def test_a_stuck_engine(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "STATS_TIMEOUT", 0.1)
    client = connect(Stuck())
    for path in ("/health", "/livez", "/readyz", "/ping"):
        assert (await client.get(path)).status_code == 503, path
    assert "stuck" in (await client.get("/readyz")).json()["reasons"][0]
    text = (await client.get("/metrics")).text
    assert 'headrace:engine_healthy{engine="0",model_name="fake-model"} 0.0' in text
    headers = {"endpoint-load-metrics-format": "TEXT"}
    answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 200
    assert "endpoint-load-metrics" not in answer.headers


class Several(FakeEngine):
    """Two engines, some of which are being replaced."""

    ended: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**super().settings, "parallel": {"data_parallel_size": 2}}

    async def stats(self, *, drain: bool = False) -> EngineStats:
        whys = (*self.ended, *[""] * (2 - len(self.ended)))
        return EngineStats(by_engine=[EngineStats(ended=why) for why in whys])


async def test_several_engines_are_well_while_one_runs(connect: Any) -> None:
    engine = Several()
    client = connect(engine)
    assert (await client.get("/health")).content == b""
    for ended, status in ((("engine 0: killed",), 200), (("engine 0: killed", "engine 1"), 503)):
        engine.ended = ended
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["reasons"]) == (status, list(ended))
        assert (await client.get("/readyz")).status_code == status
        assert (await client.get("/livez")).status_code == 200


async def test_reasons(connect: Any) -> None:
    engine = FakeEngine()
    client = connect(engine)
    assert (await client.get("/readyz")).content == b""
    engine.kill()
    assert (await client.get("/readyz")).json() == {
        "reasons": ["engine dead: the engine has stopped"]
    }
    client._transport.app.state.headrace.lifecycle.begin_drain()
    assert len((await client.get("/readyz")).json()["reasons"]) == 2


@pytest.mark.req("REL-02")
async def test_health_is_quick_under_load(live: Any, until: Any) -> None:
    """It waits for none of the requests, which go on for as long as it is asked."""
    engine = FakeEngine("x" * 300_000, model=fake_served_model(max_model_len=10**6))
    server = await live(engine)
    async with httpx2.AsyncClient(timeout=60) as client:
        body = {"prompt": "a", "max_tokens": 300_000, "stream": True}
        asked = [
            asyncio.create_task(client.post(server.url + "/v1/completions", json=body))
            for _ in range(20)
        ]
        await until(lambda: engine.num_running == 20)
        for _ in range(10):
            assert (await client.get(server.url + "/health")).status_code == 200
        assert engine.num_running == 20
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: engine.num_running == 0)


async def test_invocations(connect: Any, events: Any) -> None:
    engine = FakeEngine("Hello")
    client = connect(engine, middleware=())
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert (await client.post("/invocations", json=chat)).json()["object"] == "chat.completion"
    plain = (await client.post("/invocations", json={"prompt": "a"})).json()
    assert plain["object"] == "text_completion"
    streamed = await client.post("/invocations", json={**chat, "stream": True})
    chunks = events(streamed.text)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hello"
    for body, status, word in (
        ({"input": "a"}, 400, "Embeddings API"), ({"text_1": 1, "text_2": 2}, 400, "Score API"),
        ({"query": "a", "documents": []}, 400, "Rerank API"), ({"data": 1}, 400, "Pooling API"),
        ({"nothing": 1}, 400, "no kind of request"), ([1], 400, "object"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
    ):  # fmt: skip
        answer = await client.post("/invocations", json=body)
        assert (answer.status_code, word in answer.text) == (status, True), body
    refused = await client.post("/invocations", content=b"{}", headers={"Content-Type": "text/x"})
    assert refused.status_code == 400
    model = fake_served_model(has_chat_template=False)
    assert (
        await connect(FakeEngine(model=model)).post("/invocations", json=chat)
    ).status_code == 400


@pytest.mark.parametrize(
    ("tasks", "body", "prefix"),
    [
        (("embed", "token_embed"), {"input": "a"}, "embd-"),
        (("embed",), {"messages": [{"role": "user", "content": "a"}]}, "embd-"),
        (("classify", "token_classify"), {"input": "a"}, "classify-"),
        (("token_embed",), {"input": "a"}, "pool-"),
        (("score",), {"text_1": "a", "text_2": "b"}, "score-"),
        (("score",), {"queries": "a", "documents": "b"}, "score-"),
        (("score",), {"query": "a", "documents": ["b"]}, "rerank-"),
    ],
)
async def test_pooling_invocations(connect: Any, tasks: Any, body: Any, prefix: str) -> None:
    client = connect(FakeEngine(model=fake_pooling_model(*tasks)))
    answer = await client.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["id"].startswith(prefix)) == (200, True)


def test_shapes_are_told_apart() -> None:
    every = {path for path, _ in invocations.SHAPES}
    for path, fields in invocations.SHAPES:
        body = dict.fromkeys(fields, "x")
        assert invocations.path_for(body, {path}) == path
        assert invocations.path_for(body, every) in every


@pytest.mark.parametrize("stream", [False, True])
async def test_load_reports(connect: Any, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    client = connect(FakeEngine("x"))

    async def ask(kind: str, path: str = "/v1/completions") -> Any:
        body = {"prompt": "a", "stream": stream}
        headers = {"endpoint-load-metrics-format": kind}
        answer = await client.post(path, json=body, headers=headers)
        return answer.headers.get("endpoint-load-metrics")

    kind, _, data = (await ask("JSON")).partition(" ")
    found = json.loads(data)["named_metrics"]
    assert kind == "JSON"
    assert {"kv_cache_usage_perc", "num_requests_waiting"} <= set(found)
    assert all(isinstance(value, (int, float)) for value in found.values())
    kind, _, data = (await ask("text")).partition(" ")
    pairs = dict(pair.split("=") for pair in data.split(", "))
    assert kind == "TEXT"
    assert float(pairs["named_metrics.num_requests_waiting"]) == 0
    assert await ask("XML") is None
    assert "XML" in caplog.text
    assert await ask("JSON", "/tokenize") is None


async def test_load_counts_what_is_in_flight(connect: Any, until: Any) -> None:
    gate = asyncio.Event()
    engine = FakeEngine("x", gate=gate)
    client = connect(engine, enable_server_load_tracking=True)

    async def load() -> int:
        return int((await client.get("/load")).json()["server_load"])

    bodies = [("/v1/completions", {"prompt": "a", "stream": True})] * 2
    bodies.append(("/invocations", {"prompt": "a"}))
    asked = [asyncio.create_task(client.post(path, json=body)) for path, body in bodies]
    await until(lambda: engine.num_running == 3)
    assert await load() == 3
    assert (await client.post("/v1/completions", json={})).status_code == 400
    assert await load() == 3
    gate.set()
    await asyncio.gather(*asked)
    assert await load() == 0


async def test_statistics_off(connect: Any) -> None:
    client = connect(FakeEngine("x"), disable_log_stats=True)
    assert (await client.get("/metrics")).status_code == 404
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert "/metrics" not in client._transport.app.openapi()["paths"]


@pytest.mark.req("SEC-16")
async def test_labels_are_bounded(connect: Any) -> None:
    client = connect(FakeEngine("x"))

    async def series() -> set[str]:
        text = (await client.get("/metrics")).text
        return {
            sample.name + str(sorted(sample.labels.items()))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def strange(index: int) -> None:
        name = f"n{index}"
        await client.request("GET", f"/{name}", headers={"x-request-id": name, "user-agent": name})
        await client.request(f"M{index}", "/v1/models")
        await client.get(f"/v1/models/{name}")
        body = {"prompt": "a", "model": name, "user": name, name: 1}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json={**body, "model": "fake-model"})

    await strange(-1)
    before = await series()
    for index in range(200):
        await strange(index)
    assert await series() == before


async def test_tokens_only(connect: Any) -> None:
    client = connect(FakeEngine("x"), tokens_only=True)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/invocations"):
        assert (await client.post(path, json={})).status_code == 404, path
    for path in ("/health", "/version", "/v1/models", "/metrics"):
        assert (await client.get(path)).status_code == 200, path


async def test_quiet_paths(live: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        server = await live(
            disable_access_log_for_endpoints=("/health,/metrics", "/version"),
            uvicorn_log_level="info",
        )
        async with httpx2.AsyncClient() as client:
            for path in ("/health", "/health?a=b", "/metrics", "/version", "/v1/models"):
                await client.get(server.url + path)
        server.state.lifecycle.begin_drain()
        await asyncio.wait_for(server.task, 60)
    lines = [r.getMessage() for r in caplog.records if r.name == "uvicorn.access"]
    assert len(lines) == 1
    assert "/v1/models" in lines[0]
    assert logging.getLogger("uvicorn.access").filters == []


async def test_stacks_of_errors(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "a", "model": "other"}
    with caplog.at_level(logging.INFO, "headrace_server.errors.mapping"):
        await connect().post("/v1/completions", json=body)
        assert "Traceback" not in caplog.text
        await connect(log_error_stack=True).post("/v1/completions", json=body)
    assert "Traceback" in caplog.text


@pytest.mark.req("REL-11")
def test_addresses_that_cannot_be_had(tmp_path: Path) -> None:
    first = bind(ServerSettings(port=0))
    port = first.getsockname()[1]
    with pytest.raises(AddressError, match="port"):
        bind(ServerSettings(port=port))
    with pytest.raises(AddressError) as caught:
        bind_admin(ServerSettings(port=0, admin_port=port))
    assert caught.value.field == "admin_port"
    first.close()
    with pytest.raises(AddressError, match="uds"):
        bind(ServerSettings(uds=str(tmp_path / "no" / "folder" / "s")))


def make_certificate(folder: Path, serial: int) -> None:
    """A self-signed certificate and its key, replaced as a tool would: one file after the other."""
    made = folder / "made"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", f"{made}.key", "-out", f"{made}.pem", "-days", "2",
         "-subj", "/CN=localhost", "-set_serial", str(serial),
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    Path(f"{made}.key").replace(folder / "key.pem")
    Path(f"{made}.pem").replace(folder / "cert.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_certificates_are_refreshed(
    tmp_path: Path, until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_EVERY", 0.05)
    make_certificate(tmp_path, 11)
    settings = ServerSettings(
        port=0, ssl_keyfile=str(tmp_path / "key.pem"), ssl_certfile=str(tmp_path / "cert.pem"),
        ssl_ca_certs=str(tmp_path / "cert.pem"), enable_ssl_refresh=True,
        uvicorn_log_level="warning",
    )  # fmt: skip
    sock = bind(settings)
    application = create_app(FakeEngine("x"), settings)
    task = asyncio.create_task(serve(application, sock, settings))
    port = int(address(sock, settings).rpartition(":")[2])

    def serial() -> int:
        text = ssl.get_server_certificate(("127.0.0.1", port), timeout=60)
        shown = subprocess.run(
            ["openssl", "x509", "-noout", "-serial"], input=text, capture_output=True, text=True,
            check=True, timeout=60,
        )  # fmt: skip
        return int(shown.stdout.strip().partition("=")[2], 16)

    async def shows(wanted: int) -> None:
        async def shown() -> bool:
            return await asyncio.to_thread(serial) == wanted

        await until(shown)

    await shows(11)
    make_certificate(tmp_path, 12)
    await shows(12)
    (tmp_path / "cert.pem").write_text("garbage")
    await until(lambda: "cannot be used" in caplog.text)
    await shows(12)
    make_certificate(tmp_path, 13)
    await shows(13)
    application.state.headrace.lifecycle.begin_drain()
    assert await asyncio.wait_for(task, 60) == 0


def test_control_paths_are_all_known() -> None:
    engine = FakeEngine()
    engine.profiles = []
    routers = control.build(engine, ServerSettings(dev_mode=True))
    routers = [*routers, lora.build()]
    paths = {getattr(route, "path", "") for router in routers for route in router.routes}
    assert paths == CONTROL_PATHS
    assert control.has_profiler(engine)
