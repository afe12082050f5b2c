"""What every request goes through: logs of outputs, traces, the scope of cached prefixes."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from headrace_core.engine import OutputStream
from headrace_core.errors import (
    ConfigError,
    EngineDead,
    GenerateError,
    MissingDependency,
    RequestError,
)
from headrace_core.output import StepTimes
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_server import ServerSettings, app, create_app
from headrace_server.observability import tracing
from headrace_server.observability.instrumentation import InstrumentedEngine
from headrace_server.observability.tracing import Tracing
from headrace_server.security.cache_scope import scoped
from headrace_testing.fakes.engine import FakeEngine

DELTA = RequestOutputKind.DELTA


class Recorder:
    """Watches by writing down."""

    def __init__(self, every_output: bool = False, broken: bool = False) -> None:
        self.every_output = every_output
        self.broken = broken
        self.events: list[Any] = []

    def begin(self, prompt: Any, params: Any, request_id: str) -> Recorder:
        self.events.append(("begin", request_id))
        return self

    def begin_pooling(self, task: str, request_id: str) -> Any:
        raise AssertionError("nothing is pooled here")

    def saw(self, output: Any) -> None:
        self.events.append(("saw", output.finished))
        if self.broken:
            raise RuntimeError("a watcher that fails")

    def ended(self, error: BaseException | None) -> None:
        self.events.append(("ended", type(error).__name__ if error else None))


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("broken", [False, True])
async def test_a_watcher_sees_and_changes_nothing(pushes: bool, broken: bool) -> None:
    recorder = Recorder(every_output=True, broken=broken)
    plain, watched = FakeEngine("abcdef", pushes=pushes), FakeEngine("abcdef", pushes=pushes)
    params = SamplingParams(output_kind=DELTA, max_tokens=20)
    expected = [o.outputs for o in [o async for o in plain.generate("p", params, "r")]]
    engine = InstrumentedEngine(watched, [recorder])
    stream = engine.generate("p", params, "r")
    assert isinstance(stream, OutputStream) == pushes
    assert [o.outputs async for o in stream] == expected
    assert recorder.events == [
        ("begin", "r"), *[("saw", False)] * (len(expected) - 1), ("saw", True), ("ended", None),
    ]  # fmt: skip


@pytest.mark.parametrize("every_output", [False, True])
async def test_pushing(every_output: bool) -> None:
    recorder = Recorder(every_output)
    engine = InstrumentedEngine(FakeEngine("abcdef"), [recorder])
    params = SamplingParams(output_kind=DELTA, max_tokens=20)
    stream: Any = engine.generate("p", params, "r")
    text = (await anext(stream)).outputs[0].text
    outputs, texts = [], []

    def take(output: Any) -> bool:
        outputs.append(output)
        return True

    def take_text(part: str, _: int) -> bool:
        texts.append(part)
        return True

    await stream.push(take, take_text)
    whole = text + "".join(texts) + "".join(c.text for o in outputs for c in o.outputs)
    assert whole == "abcdef"
    assert bool(texts) != every_output, "text goes round only watchers that do not want it"
    assert recorder.events[-2:] == [("saw", True), ("ended", None)]


async def test_ends_are_told_once() -> None:
    recorder = Recorder()
    dying = InstrumentedEngine(FakeEngine("abcdef", die_after=2), [recorder])
    with pytest.raises(EngineDead):
        async for _ in dying.generate("p", SamplingParams(output_kind=DELTA), "r"):
            pass
    assert recorder.events[-1] == ("ended", "EngineDead")
    recorder = Recorder()
    inner = FakeEngine("abcdef")
    stream: Any = InstrumentedEngine(inner, [recorder]).generate("p", SamplingParams(), "r")
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert recorder.events.count(("ended", None)) == 1
    assert inner.aborted == ["r"]


def test_without_watchers_the_engine_is_itself() -> None:
    engine = FakeEngine()
    settings = ServerSettings(disable_log_stats=True)
    assert create_app(engine, settings).state.headrace.engine is engine


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_no_route_hears_the_end_of(live: Any, until: Any, stream: bool) -> None:
    engine = FakeEngine("x" * 3000, delay=0.005)
    server = await live(engine)

    async def count(reason: str) -> float:
        async with httpx2.AsyncClient() as client:
            text = (await client.get(server.url + "/metrics")).text
        (line,) = [
            x for x in text.splitlines() if f'finished_reason="{reason}"' in x and "_total" in x
        ]
        return float(line.rpartition(" ")[2])

    body = {"prompt": "a", "max_tokens": 3000, "n": 2, "seed": 1, "stream": stream}
    async with httpx2.AsyncClient() as client:
        asking = asyncio.create_task(client.post(server.url + "/v1/completions", json=body))
        await until(lambda: engine.num_running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: engine.num_running == 0)
        assert [await count(r) for r in ("abort", "error", "stop", "length")] == [2, 0, 0, 0]
        engine.reject = GenerateError("failed")
        await client.post(server.url + "/v1/completions", json=body)
        assert [await count(r) for r in ("abort", "error")] == [2, 2]
        engine.reject = RequestError("wrong")
        await client.post(server.url + "/v1/completions", json=body)
        assert [await count(r) for r in ("abort", "error")] == [2, 2]


async def test_output_log(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace_server.observability.request_log"):
        client = connect(
            FakeEngine("abcdef", tokens_per_output=3), enable_log_requests=True,
            enable_log_outputs=True, max_log_len=4,
        )  # fmt: skip
        for stream in (False, True):
            body = {"prompt": "p", "request_id": f"s{stream}", "stream": stream}
            await client.post("/v1/completions", json=body)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("output")]
    whole = "text 'abcd', token ids [97, 98, 99, 100], finish reason stop"
    assert lines[0].endswith(f"(complete): {whole}")
    assert "(delta): text 'abc', token ids [97, 98, 99], finish reason None" in lines[1]
    assert lines[-1].endswith(f"(complete): {whole}")
    assert [("delta" in line) for line in lines] == [False, True, True, True, False]
    assert all(hasattr(r, "request_id") for r in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_response_log(connect: Any, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "headrace_server.observability.request_log"):
        client = connect(FakeEngine("abcdef"), log_responses=True)
        await client.post("/v1/completions", json={"prompt": "p", "stream": stream})
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("response of ")
    assert line.endswith("200 'abcdef'") if stream else '"text":"abcdef"' in line


@pytest.mark.req("SEC-25")
async def test_nothing_is_logged_without_the_flags(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client = connect(FakeEngine("canary-output"), enable_server_load_tracking=True)
        for stream in (False, True):
            await client.post("/v1/completions", json={"prompt": "canary-prompt", "stream": stream})
            chat = {"messages": [{"role": "user", "content": "canary-chat"}], "stream": stream}
            await client.post("/v1/chat/completions", json=chat)
        await client.post("/v1/completions", json={"prompt": ["canary"], "max_tokens": -1})
        metrics = (await client.get("/metrics")).text
    assert "canary" not in caplog.text
    assert "canary" not in metrics


@pytest.mark.req("SEC-23")
async def test_prefixes_belong_to_a_key(connect: Any) -> None:
    engine = FakeEngine("x")
    client = connect(engine, api_key=("one", "two"), prefix_cache_scope="key")
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "same"}),
        ("/v1/completions", {"prompt": [97, 98]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "same"}]}),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": "same"}], "cache_salt": "mine"}),
    ]  # fmt: skip
    for path, body in bodies:
        salts = []
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            for stream in (False, True):
                answer = await client.post(path, json={**body, "stream": stream}, headers=headers)
                assert answer.status_code == 200
                salts.append(_salt(engine.requests[-1].prompt))
        assert len(set(salts)) == 2
        assert salts[0] == salts[1] == salts[4] == salts[5] != salts[2] == salts[3]
    await connect(engine, api_key=("one",)).post(
        "/v1/completions", json={"prompt": "same"}, headers={"Authorization": "Bearer one"}
    )
    assert _salt(engine.requests[-1].prompt) is None, "shared by default"


def _salt(prompt: Any) -> str | None:
    if isinstance(prompt, ChatPrompt):
        return prompt.cache_salt
    return prompt.get("cache_salt") if isinstance(prompt, dict) else None


def test_the_salt_of_an_encoder_decoder_model_is_in_its_decoders_prompt() -> None:
    for decoder in ("x", [1, 2], {"prompt": "x"}):
        made: Any = scoped({"encoder_prompt": "", "decoder_prompt": decoder})  # type: ignore[typeddict-item]
        assert _salt(made["decoder_prompt"]) is not None
        assert set(made) == {"encoder_prompt", "decoder_prompt"}
    assert scoped({"encoder_prompt": "", "decoder_prompt": None}) == {
        "encoder_prompt": "", "decoder_prompt": None,
    }  # fmt: skip


def test_a_salt_cannot_be_made_to_meet_another() -> None:
    chat = ChatPrompt([], cache_salt="a")
    assert _salt(scoped(chat)) != _salt(scoped(ChatPrompt([], cache_salt="b")))
    assert _salt(scoped(chat)) != "a"
    assert len({_salt(scoped({"prompt": "x", "cache_salt": s})) for s in ("", "\0", "\0\0")}) == 3


class Collector:
    """An application whose spans stay in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracings: list[Tracing] = []

        def make(engine: Any, settings: ServerSettings) -> Tracing:
            made = Tracing(engine.model, "http://unused", self.exporter)
            self.tracings.append(made)
            return made

        monkeypatch.setattr(app, "_tracing", make)

    def spans(self) -> list[Any]:
        for made in self.tracings:
            made.flush()
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector(monkeypatch)
    yield made
    for tracing_ in made.tracings:
        tracing_.shutdown()


STEPS = ("time_in_scheduler", "time_in_model_forward", "time_in_model_execute")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_span_a_request(connect: Any, collector: Collector, stream: bool) -> None:
    client = connect(FakeEngine("canary", cached_tokens=1), otlp_traces_endpoint="http://unused")
    body = {"prompt": "canary-prompt", "stream": stream, "max_tokens": 30, "request_id": "mine"}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    await client.post("/v1/completions", json=body, headers=headers)
    (span,) = collector.spans()
    assert span.name == "llm_request"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    found = span.attributes
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.response.model"] == "fake-model"
    assert found["gen_ai.request.id"].startswith("cmpl-mine")
    assert found["gen_ai.request.max_tokens"] == 30
    assert found["gen_ai.usage.output_tokens"] == 7
    assert found["gen_ai.usage.input_tokens"] == len("canary-prompt") + 1
    assert found["gen_ai.usage.cache_read.input_tokens"] == 1
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    for name in ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill",
                 "time_in_model_decode", "time_in_model_inference"):  # fmt: skip
        assert 0 <= found[f"gen_ai.latency.{name}"] < 5, name
    assert not {name for name in found if name.endswith(STEPS)}, "nobody asked"
    # Its own parameters and numbers only (SEC-25).
    assert "canary" not in str({k: v for k, v in found.items() if k != "gen_ai.request.id"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("times", [StepTimes(0.5), StepTimes(0.5, 1.5), StepTimes(0.5, 1.5, 2.0)])
async def test_what_its_steps_took(
    connect: Any, collector: Collector, stream: bool, times: StepTimes
) -> None:
    client = connect(FakeEngine("abcdef", step_times=times))
    await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    (span,) = collector.spans()
    found = [span.attributes.get(f"gen_ai.latency.{name}") for name in STEPS]
    assert found == list(times)


async def test_without_a_parent_and_with_errors(connect: Any, collector: Collector) -> None:
    client = connect(FakeEngine("x"))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    await client.post("/v1/chat/completions", json=chat)
    await client.post("/v1/chat/completions", json=chat, headers={"traceparent": "nonsense"})
    spans = collector.spans()
    assert [span.parent for span in spans] == [None, None]
    assert spans[0].attributes["gen_ai.operation.name"] == "chat"
    assert spans[0].context.trace_id != spans[1].context.trace_id
    client = connect(FakeEngine("abcdef", fail_after=2))
    await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    (span,) = collector.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "GenerateError"
    assert span.status.description is None


async def test_headers_without_tracing_warn_once(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(FakeEngine("x"))
    for _ in range(3):
        await client.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert caplog.text.count("tracing is off") == 1


def test_tracing_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependency, match=r"headrace-server\[otel\]"):
        create_app(FakeEngine(), ServerSettings(otlp_traces_endpoint="http://127.0.0.1:1"))


def test_other_protocols_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(otlp_traces_endpoint="http://127.0.0.1:1")
    for variable in tracing.PROTOCOL_VARIABLES:
        with monkeypatch.context() as patched:
            patched.setenv(variable, "grpc")
            with pytest.raises(ConfigError, match="http/protobuf"):
                create_app(FakeEngine(), settings)


class _Sink(BaseHTTPRequestHandler):
    """A collector on loopback: notes what comes, or lets it hang."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        server.bodies.append((self.path, body))
        server.release.wait(30)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def sink() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), _Sink)
    server.bodies, server.release = [], threading.Event()
    server.release.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


async def test_an_otlp_collector_gets_the_span(connect: Any, sink: Any, until: Any) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url = f"http://127.0.0.1:{sink.server_address[1]}/v1/traces"
    client = connect(FakeEngine("x"), otlp_traces_endpoint=url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    state = client._transport.app.state.headrace
    await asyncio.to_thread(state.tracing.shutdown)
    ((path, body),) = sink.bodies
    assert path == "/v1/traces"
    sent = ExportTraceServiceRequest.FromString(body)
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    text = (await client.get("/metrics")).text
    assert "headrace:trace_spans_ended_total 1.0" in text
    assert "headrace:trace_spans_exported_total 1.0" in text
    assert "headrace:trace_spans_failed_total 0.0" in text


@pytest.mark.req("REL-19")
@pytest.mark.parametrize("kind", ["hangs", "absent"])
async def test_a_collector_that_fails_has_no_effect(
    connect: Any, sink: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT", 0.2)
    sink.release.clear()
    port = sink.server_address[1] if kind == "hangs" else 1
    client = connect(FakeEngine("x"), otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
    for _ in range(40):
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 200
    async with asyncio.timeout(60):  # nor does the end wait for it
        await asyncio.to_thread(client._transport.app.state.headrace.tracing.shutdown)
    assert not sink.release.is_set(), "all this while it hangs"
