"""A pooling model behind the asynchronous engine: many at once, cancelled, aborted, counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from pooling_stub import Made, Tokens, make

from headrace_core.context import OWNER
from headrace_core.engine import AdmissionTicket
from headrace_core.errors import GenerateError, QueueFull, RequestError, UnsupportedFeature
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor, IOProcessorResponse
from headrace_core.sampling.params import SamplingParams
from headrace_engine.engine import Engine
from headrace_engine.pooling.vectors import as_array

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def started(made: Made, **options: Any) -> AsyncIterator[Engine]:
    engine = made.engine(**options)
    try:
        yield engine
    finally:
        await engine.shutdown()


def vector(output: Any) -> torch.Tensor:
    return torch.from_numpy(as_array(output.outputs.data).copy())


@asynccontextmanager
async def held(made: Made) -> AsyncIterator[None]:
    """No step is taken in the block."""
    loop = made.client._loop
    assert loop is not None
    go = threading.Event()
    answered = loop._call(lambda: go.wait(60))
    try:
        yield
    finally:
        go.set()
        await asyncio.wrap_future(answered)


async def test_many_at_once_each_get_their_own() -> None:
    made = make(causal=True, max_num_batched_tokens=40, max_num_seqs=8)
    async with started(made) as engine:
        texts = ["x" * (1 + i % 50) + str(i) for i in range(64)]
        tasks = ("embed", "token_embed", "classify")
        outputs = await asyncio.gather(
            *(
                engine.encode(text, PoolingParams(), f"r{i}", task=tasks[i % 3])
                for i, text in enumerate(texts)
            )
        )
        stats = await engine.stats()
    for i, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        assert output.request_id == f"r{i}"
        want = made.model.dense(Tokens().encode(text), task=tasks[i % 3])
        torch.testing.assert_close(vector(output), want)
    assert stats.prompt_tokens == sum(len(t) + 2 for t in texts)
    assert (stats.num_requests_running, stats.generation_tokens) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


async def test_cancelling_aborts_and_frees_the_name() -> None:
    made = make()
    async with started(made) as engine:
        async with held(made):
            task = asyncio.create_task(engine.encode("text", PoolingParams(), "r", task="embed"))
            await asyncio.sleep(0)
            while not engine._processor.states:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not engine._processor.states
        again = await engine.encode("text", PoolingParams(), "r", task="embed")
        assert again.finished
        assert made.model.pooler.batches == [1]


async def test_aborting_by_name_ends_the_call() -> None:
    long = {"enable_chunked_processing": True, "native_len": 16, "max_embed_len": 10_000}
    made = make(max_model_len=16, info=long)
    async with started(made) as engine:
        async with held(made):
            calls = [
                asyncio.create_task(engine.encode("text", PoolingParams(), "short", task="embed")),
                asyncio.create_task(
                    engine.encode([9] * 900, PoolingParams(), "long", task="embed")
                ),
                asyncio.create_task(engine.score(["a"], ["b", "c"], PoolingParams(), "pairs")),
            ]
            while len(engine._processor.states) < 5:
                await asyncio.sleep(0)
            await engine.abort(["short", "long", "pairs"])
            for call in calls:
                with pytest.raises(GenerateError, match="aborted"):
                    await call
        assert (await engine.encode("on", PoolingParams(), "next", task="embed")).finished


async def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    made = make(max_model_len=16, max_num_batched_tokens=16, max_num_seqs=4,
                info={"enable_chunked_processing": True, "native_len": 16,
                      "max_embed_len": 1_000_000})  # fmt: skip
    async with started(made) as engine:
        long = asyncio.create_task(
            engine.encode([30] * 160_000, PoolingParams(), "long", task="embed")
        )
        while not made.model.steps:
            await asyncio.sleep(0)
        await engine.encode("short", PoolingParams(), "short", task="embed")
        assert not long.done()
        assert len(made.model.steps) < 2_000  # of the ten thousand
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert not engine._processor.states


async def test_long_texts_are_the_same_online() -> None:
    settings: dict[str, Any] = {
        "max_model_len": 16,
        "info": {"enable_chunked_processing": True, "native_len": 16, "max_embed_len": 10_000},
    }
    prompt = [20 + i % 97 for i in range(777)]
    offline = make(**settings)
    with offline.offline() as llm:
        (want,) = llm.encode([prompt], PoolingParams(), task="embed")
    async with started(make(**settings)) as engine:
        found = await engine.encode(prompt, PoolingParams(), "r", task="embed")
    assert found.outputs.data == want.outputs.data
    assert found.prompt_token_ids == prompt


async def test_refusals() -> None:
    made = make(scheduler={"max_queued_requests": 2})
    async with started(made) as engine:
        with pytest.raises(UnsupportedFeature, match="runner pooling"):
            await anext(aiter(engine.generate("text", SamplingParams(), "r")))
        with pytest.raises(RequestError, match="1:1, 1:N or N:N"):
            await engine.score(["a", "b"], ["c", "d", "e"], PoolingParams(), "r")
        with pytest.raises(RequestError, match="priority"):
            await engine.encode("text", PoolingParams(), "r", task="embed", priority=3)
        async with held(made):
            calls = [
                asyncio.create_task(engine.encode("t", PoolingParams(), str(i), task="embed"))
                for i in range(2)
            ]
            while len(engine._processor.states) < 2:
                await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await engine.encode("t", PoolingParams(), "third", task="embed")
        assert len(await asyncio.gather(*calls)) == 2
        assert not engine._processor.states


@pytest.mark.parametrize("limits", [{"max_queued_requests": 1}, {"max_queued_requests": 6,
                                    "max_queued_tokens": 40}])  # fmt: skip
async def test_a_call_that_was_let_in_is_not_refused_in_its_middle(limits: dict[str, int]) -> None:
    long = {"enable_chunked_processing": True, "native_len": 16, "max_embed_len": 10_000}
    made = make(max_model_len=16, info=long, scheduler=limits)
    most = 0
    async with started(made) as engine:
        add = made.client.add

        def counting(requests: Any) -> None:
            nonlocal most
            most = max(most, len(engine._processor.states))
            add(requests)

        made.client.add = counting  # type: ignore[method-assign]
        scores = await engine.score(["a"], [f"text {i}" for i in range(40)], PoolingParams(), "r")
        assert len(scores) == 40
        assert (await engine.encode([9] * 900, PoolingParams(), "long", task="embed")).finished
    assert most <= max(1, limits["max_queued_requests"] // 2), "others find room in the queue"


@pytest.mark.parametrize("limits", [{"max_queued_requests": 1}, {"max_queued_requests": 6,
                                    "max_queued_tokens": 40}])  # fmt: skip
async def test_the_prompts_of_one_call_are_one_request_to_the_queue(limits: dict[str, int]) -> None:
    made, entry, most = make(scheduler=limits), AdmissionTicket(), 0
    async with started(made) as engine:
        add = made.client.add

        def counting(requests: Any) -> None:
            nonlocal most
            most = max(most, len(engine._processor.states))
            add(requests)

        made.client.add = counting  # type: ignore[method-assign]
        texts = [f"text {i}" for i in range(40)]
        calls = [engine.encode(text, PoolingParams(), f"r-{i}", task="embed", entry=entry)
                 for i, text in enumerate(texts)]  # fmt: skip
        outputs = await asyncio.gather(*calls)
    assert [output.prompt_token_ids for output in outputs] == [Tokens().encode(t) for t in texts]
    assert most <= max(1, limits["max_queued_requests"] // 2), "others find room in the queue"


async def test_a_call_that_is_refused_is_so_before_any_of_its_prompts_runs() -> None:
    made = make(scheduler={"max_queued_requests": 1})
    async with started(made) as engine:
        async with held(made):
            first = asyncio.create_task(engine.encode("t", PoolingParams(), "0", task="embed"))
            while not engine._processor.states:
                await asyncio.sleep(0)
            entry = AdmissionTicket()
            calls = [engine.encode("t", PoolingParams(), f"r-{i}", task="embed", entry=entry)
                     for i in range(3)]  # fmt: skip
            ends = await asyncio.gather(*calls, return_exceptions=True)
            scored = engine.score(["a"], ["b", "c"], PoolingParams(), "s")
            ends += await asyncio.gather(scored, return_exceptions=True)
            assert [type(end) for end in ends] == [QueueFull] * 4
            assert len(engine._processor.states) == 1
        assert (await first).finished


async def test_a_failing_pair_ends_the_others() -> None:
    made = make(poison=77)
    async with started(made) as engine:
        with pytest.raises(GenerateError, match="not finite"):
            await engine.score(["a"], ["b", {"prompt_token_ids": [77]}, "c"], PoolingParams(), "r")
        assert not engine._processor.states
        scores = await engine.score(["a"], ["b", "c"], PoolingParams(), "r")
        assert [score.request_id for score in scores] == ["r-0", "r-1"]


async def test_pausing_holds_pooling_requests() -> None:
    made = make()
    async with started(made) as engine:
        await engine.pause_generation()
        call = asyncio.create_task(engine.encode("text", PoolingParams(), "r", task="embed"))
        while not engine._gate.num_held:
            await asyncio.sleep(0)
        assert (await engine.stats()).num_requests_waiting == 1
        await engine.resume_generation()
        assert (await call).finished


async def test_whose_request_it_is_reaches_the_core() -> None:
    made = make()
    seen: list[str] = []
    async with started(made) as engine:
        add = made.client.add
        made.client.add = lambda requests: (  # type: ignore[method-assign]
            seen.extend(r.owner for r in requests), add(requests)
        )[1]  # fmt: skip
        OWNER.set("somebody")
        await engine.score(["a"], ["b"], PoolingParams(), "r")
    assert seen == ["somebody", "somebody"]


class Products(IOProcessor):
    """Text -> three prompts -> products of their embeddings."""

    def parse_request(self, request: Any) -> str:
        if not isinstance(request, str):
            raise ValueError("data must be text")
        return request

    def pre_process(self, prompt: Any, request_id: str | None = None, **_: Any) -> list[str]:
        return [prompt, prompt[::-1], prompt * 2]

    def post_process(self, model_output: Any, request_id: str | None = None, **_: Any) -> Any:
        a, b, c = (torch.tensor(output.outputs.data.tolist()) for output in model_output)
        return {"id": request_id, "dots": [float(a @ b), float(a @ c)]}

    def output_to_response(self, output: Any) -> IOProcessorResponse:
        return IOProcessorResponse(output)


async def test_fifty_requests_through_an_io_processor() -> None:
    made = make(max_num_batched_tokens=64)
    processor = Products(made.config, made.input_processor.model)
    async with started(made, io_processor=processor) as engine:
        texts = [f"text {i}" for i in range(50)]
        answers = await asyncio.gather(
            *(engine.answer_plugin(text, None, f"p{i}") for i, text in enumerate(texts))
        )
    for i, (text, found) in enumerate(zip(texts, answers, strict=True)):
        a, b, c = (made.model.dense(Tokens().encode(t)) for t in (text, text[::-1], text * 2))
        assert found["id"] == f"p{i}"
        torch.testing.assert_close(
            torch.tensor(found["dots"]), torch.stack([a @ b, a @ c]), atol=1e-5, rtol=1e-5
        )


async def test_a_failure_within_an_io_processor_is_that_request_s() -> None:
    made = make(poison=77)
    processor = Products(made.config, made.input_processor.model)
    async with started(made, io_processor=processor) as engine:
        good, bad = await asyncio.gather(
            engine.answer_plugin("good", None, "good"),
            engine.answer_plugin(chr(77) + "x", None, "bad"),
            return_exceptions=True,
        )
        assert isinstance(bad, GenerateError)
        assert good["id"] == "good"
        assert not engine._processor.states
    async with started(make()) as plain:
        with pytest.raises(UnsupportedFeature, match="--io-processor-plugin"):
            await plain.answer_plugin("text", None, "r")
