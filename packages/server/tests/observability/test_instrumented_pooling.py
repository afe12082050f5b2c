"""What watchers see of calls that pool: counts, spans, log lines, the scope of cached prefixes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from headrace_core.errors import GenerateError, RequestError
from headrace_core.pooling import PoolingParams
from headrace_server import ServerSettings, app
from headrace_server.observability.instrumentation import InstrumentedEngine
from headrace_server.observability.tracing import Tracing
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

SCORED = {"text_1": "ab", "text_2": ["a", "b", "c"]}


def fake(*tasks: str, **options: Any) -> FakeEngine:
    return FakeEngine(model=fake_pooling_model(*tasks), **options)


class Recorder:
    """Watches by writing down."""

    every_output = False

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.events: list[Any] = []

    def begin(self, prompt: Any, params: Any, request_id: str) -> Any:
        raise AssertionError("nothing is generated here")

    def begin_pooling(self, task: str, request_id: str) -> Recorder:
        self.events.append((task, request_id))
        return self

    def ended(self, outputs: Sequence[Any], error: BaseException | None) -> None:
        self.events.append((len(outputs), type(error).__name__ if error else None))
        if self.broken:
            raise RuntimeError("a watcher that fails")


@pytest.mark.parametrize("broken", [False, True])
async def test_a_watcher_sees_and_changes_nothing(broken: bool) -> None:
    recorder = Recorder(broken)
    plain, params = fake(), PoolingParams()
    engine = InstrumentedEngine(fake(), [recorder, recorder])
    one = await engine.encode("ab", params, "r", task="embed")
    pairs = await engine.score(["a"], ["b", "c"], params, "s")
    assert one == await plain.encode("ab", params, "r", task="embed")
    assert pairs == await plain.score(["a"], ["b", "c"], params, "s")
    assert recorder.events[2:4] == [(1, None)] * 2
    assert recorder.events[6:] == [(2, None)] * 2
    assert recorder.events[4] == ("score", "s")
    assert (engine.speech, engine.io_processor) == (None, None)


async def test_ends_are_told() -> None:
    recorder = Recorder()
    engine = InstrumentedEngine(fake(reject=RequestError("no")), [recorder])
    with pytest.raises(RequestError):
        await engine.encode("a", PoolingParams(), "r", task="embed")
    assert recorder.events[-1] == (0, "RequestError")
    inner = fake(gate=asyncio.Event())
    call = asyncio.ensure_future(
        InstrumentedEngine(inner, [recorder]).score(["a"], ["b"], PoolingParams(), "r")
    )
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert recorder.events[-1] == (0, "CancelledError")
    assert inner.aborted == ["r"]


async def test_counts(connect: Any) -> None:
    engine = fake("embed", "classify", "score", cached_tokens=1)
    client = connect(engine)

    async def samples(name: str, label: str) -> dict[str, float]:
        text = (await client.get("/metrics")).text
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "headrace:" + name and label in sample.labels
        }

    assert await samples("pooling_requests_total", "task") == {
        "embed": 0, "classify": 0, "score": 0,
    }  # fmt: skip
    await client.post("/v1/embeddings", json={"input": [[1, 2], [3]]})
    await client.post("/classify", json={"input": [1, 2, 3]})
    await client.post("/score", json=SCORED)
    await client.post("/v1/embeddings", json={"input": "a" * 9999})
    engine.reject = GenerateError("no")
    await client.post("/v1/embeddings", json={"input": "a"})
    assert await samples("pooling_requests_total", "task") == {
        "embed": 2, "classify": 1, "score": 3,
    }  # fmt: skip
    assert await samples("pooling_prompt_tokens_total", "task") == {
        "embed": 3, "classify": 3, "score": 9,
    }  # fmt: skip
    reasons = await samples("request_success_total", "finished_reason")
    assert reasons == {"stop": 6, "length": 0, "abort": 0, "error": 1}
    prompts = await samples("request_prompt_tokens_count", "engine")
    computed = await samples("request_prefill_kv_computed_tokens_sum", "engine")
    assert (prompts, computed) == ({"0": 6}, {"0": 15 - 5})


async def test_a_client_that_left_is_counted(live: Any, until: Any) -> None:
    engine = fake(gate=asyncio.Event())
    server = await live(engine)
    async with httpx2.AsyncClient() as client:
        url = server.url + "/v1/embeddings"
        asking = asyncio.create_task(client.post(url, json={"input": ["a", "b"]}))
        await until(lambda: engine.num_running == 2)
        asking.cancel()
        await until(lambda: engine.num_running == 0)
        text = (await client.get(server.url + "/metrics")).text
    assert 'finished_reason="abort",model_name="fake-model"} 2.0' in text


async def test_spans(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    made = Tracing(fake_pooling_model(), "http://unused", exporter)
    monkeypatch.setattr(app, "_tracing", lambda engine, settings: made)
    client = connect(fake("embed", "score", cached_tokens=1))
    await client.post("/v1/embeddings", json={"input": "canary", "request_id": "mine"})
    await client.post("/score", json=SCORED)
    await client.post("/v1/embeddings", json={"input": "a" * 9999})
    made.flush()
    embed, score, failed = exporter.get_finished_spans()
    made.shutdown()
    assert embed.attributes["gen_ai.operation.name"] == "embeddings"
    assert embed.attributes["gen_ai.request.id"].startswith("embd-mine-0-")
    assert embed.attributes["gen_ai.usage.input_tokens"] == 7
    assert embed.attributes["gen_ai.usage.cache_read.input_tokens"] == 1
    assert score.attributes["gen_ai.operation.name"] == "score"
    assert score.attributes["gen_ai.usage.input_tokens"] == 9
    assert failed.attributes["error.type"] == "PromptTooLong"
    assert "canary" not in str(embed.attributes)


async def test_logs(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace_server.observability.request_log"):
        client = connect(
            fake("embed", "token_embed", "score"), enable_log_requests=True,
            enable_log_outputs=True,
        )  # fmt: skip
        body = {"input": [1, 2], "normalize": False}
        await client.post("/v1/embeddings", json=body)
        await client.post("/pooling", json=body)
        await client.post("/score", json={"text_1": "a", "text_2": "ab"})
    lines = [r.getMessage() for r in caplog.records]
    outputs = [line.partition(" (")[2] for line in lines if line.startswith("output")]
    assert outputs == [
        "embed): [4] numbers [1.0, 2.0, 0.0, 0.0], 2 prompt tokens",
        "token_embed): [2, 4] numbers [1.0, 0.0, 0.0, 0.0], 2 prompt tokens",
        "score): score 0.5, 3 prompt tokens",
    ]
    assert sum("PoolingParams(" in line for line in lines) == 2


@pytest.mark.req("SEC-25")
async def test_nothing_is_logged_without_the_flags(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client = connect(fake("embed", "classify", "score"))
        for path in ("/v1/embeddings", "/classify"):
            await client.post(path, json={"input": "canary-text"})
        await client.post("/score", json={"text_1": "canary", "text_2": "canary"})
        await client.post("/rerank", json={"query": "canary", "documents": ["canary"]})
    assert "canary" not in caplog.text


@pytest.mark.req("SEC-23")
async def test_prefixes_belong_to_a_key(connect: Any) -> None:
    engine = fake("embed", "score")
    client = connect(engine, api_key=("one", "two"), prefix_cache_scope="key")

    async def salts(path: str, body: Any) -> list[Any]:
        found = []
        for key in ("one", "two", "one"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
            prompt = engine.pooled[-1].prompt
            found.append(
                [side["cache_salt"] for side in (prompt if path == "/score" else [prompt])]
            )
        return found

    for path, body in (("/v1/embeddings", {"input": "same"}), ("/score", SCORED)):
        first, second, third = await salts(path, body)
        assert first == third != second
        assert None not in first


def test_without_watchers_the_engine_is_itself() -> None:
    engine = fake()
    settings = ServerSettings(disable_log_stats=True)
    assert app.create_app(engine, settings).state.headrace.engine is engine
