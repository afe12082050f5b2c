"""The asynchronous engine over a core in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from engine_fakes import (
    EOS,
    PATIENCE,
    CharTokenizer,
    Turnstile,
    expected_tokens,
    make_core,
    served_model,
    until_stats,
)

from headrace_core.config import ModelConfig
from headrace_core.context import OWNER
from headrace_core.engine import EngineClient
from headrace_core.errors import (
    EngineAsleep,
    EngineDead,
    GenerateError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from headrace_core.output import FlatLogprobs, RequestOutput
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine import engine as engine_module
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.config import EngineConfig, ObservabilityConfig, SchedulerConfig
from headrace_engine.engine import UNREAD_BYTES, Engine, plain_settings
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.threads import InputThreads
from headrace_engine.output_processing.output import ENTRY_BYTES, TOKEN_BYTES
from headrace_testing.waiting import until, wait_until

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def make_engine(
    stream_interval: int = 1,
    max_queued: int = 1000,
    max_queued_tokens: int | None = None,
    **core: Any,
) -> Engine:
    input_processor = InputProcessor(CharTokenizer(), served_model())
    config = EngineConfig(
        scheduler=SchedulerConfig(
            stream_interval=stream_interval,
            max_queued_requests=max_queued,
            max_queued_tokens=max_queued_tokens,
        )
    )
    return Engine(InprocClient(lambda _: make_core(**core)), input_processor, config)


@pytest_asyncio.fixture(params=[True, False], ids=["overlapped", "simple"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    made = make_engine(overlapped=request.param)
    yield made
    await made.shutdown()


async def collect(engine: Engine, *args: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args, **options)]


def text_of(tokens: list[int]) -> str:
    return "".join(chr(t) for t in tokens if t != EOS)


async def until_held(engine: Engine, count: int) -> None:
    """So many requests have been taken in and have not ended."""
    await until(lambda: len(engine._processor.states) == count)


async def until_waiting(engine: Engine, count: int) -> None:
    await until_stats(engine, lambda stats: stats.num_requests_waiting == count)


async def is_free(engine: Engine) -> bool:
    stats = await engine.stats()
    return (
        stats.num_requests_running == stats.num_requests_waiting == 0
        and stats.num_free_blocks == stats.num_blocks
    )


async def until_free(engine: Engine) -> None:
    await until(lambda: is_free(engine))


async def test_is_an_engine_client(engine: Engine) -> None:
    client: EngineClient = engine
    assert client.model.vocab_size == served_model().vocab_size
    assert client.dead_error is None
    await client.check_health()


@pytest.mark.req("REL-16")
async def test_deltas_equal_the_whole(engine: Engine) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, output_kind=DELTA)
    deltas = await collect(engine, "hello", params, "r1")
    whole = await collect(engine, "hello", SamplingParams(max_tokens=80, ignore_eos=True), "r2")
    final = await collect(
        engine, "hello", SamplingParams(max_tokens=80, ignore_eos=True, output_kind=FINAL), "r3"
    )
    expected = expected_tokens("hello", params)
    assert len(final) == 1
    assert final[0].outputs[0].token_ids == whole[-1].outputs[0].token_ids == expected
    assert [t for o in deltas for t in o.outputs[0].token_ids] == expected
    assert "".join(o.outputs[0].text for o in deltas) == text_of(expected)
    assert whole[-1].outputs[0].text == text_of(expected)
    assert [o.finished for o in deltas].count(True) == 1
    assert deltas[-1].outputs[0].finish_reason == "length"
    merged = deltas[0]
    for later in deltas[1:]:
        merged.add(later, aggregate=True)
    assert merged.outputs == whole[-1].outputs


async def test_identical_in_a_batch_of_64(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30)
    prompts = [f"prompt number {i}" for i in range(64)]
    results = await asyncio.gather(
        *(collect(engine, p, params, f"r{i}") for i, p in enumerate(prompts))
    )
    for prompt, outputs in zip(prompts, results, strict=True):
        assert outputs[-1].outputs[0].token_ids == expected_tokens(prompt, params)
    await until_free(engine)


@pytest.mark.req("REL-05")
async def test_64_streams_half_cancelled(engine: Engine) -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True, output_kind=DELTA)

    async def stream(index: int) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(f"p{index}", params, f"r{index}"):
            tokens += output.outputs[0].token_ids
            if index % 2 and len(tokens) > index:
                await asyncio.Event().wait()  # until it is cancelled
        return tokens

    tasks = [asyncio.create_task(stream(i)) for i in range(64)]
    whole = await asyncio.gather(*tasks[::2])
    for task in tasks[1::2]:
        task.cancel()
    ended = await asyncio.gather(*tasks[1::2], return_exceptions=True)
    assert all(isinstance(e, asyncio.CancelledError) for e in ended)
    for index, tokens in zip(range(0, 64, 2), whole, strict=True):
        assert tokens == expected_tokens(f"p{index}", params)
    await until_free(engine)


@pytest.mark.req("REL-05")
async def test_dropped_consumers_free_everything(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    closed = engine.generate("closed", params, "r1")
    await anext(closed)
    await closed.aclose()
    forgotten = engine.generate("forgotten", params, "r2")
    await anext(forgotten)
    del forgotten
    gc.collect()
    async for _ in engine.generate("left", params, "r3"):
        break
    gc.collect()
    await until_free(engine)


@pytest.mark.parametrize("given", [None, 3, b"r1", ["r1", None]])
async def test_ids_to_abort_that_are_not_text_are_refused(given: Any) -> None:
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    outputs = engine.generate("x", params, "r1")
    await anext(outputs)
    with pytest.raises(
        RequestError, match=r"^request_ids.*: must be text, or a list of request ids"
    ):
        await engine.abort(given)
    await engine.abort("unknown")
    turnstile.release()
    assert not (await anext(outputs)).finished
    await engine.abort("r1")
    turnstile.open()
    ended = [output async for output in outputs][-1]
    assert ended.outputs[0].finish_reason == "abort"
    await until_free(engine)
    await engine.shutdown()


async def test_abort_ends_with_reason_abort() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=2, seed=1)
    outputs = []
    async for output in engine.generate("x", params, "r1"):
        outputs.append(output)
        if len(outputs) == 2:
            await engine.abort(["r1", "unknown"])
            turnstile.open()
        turnstile.release()
    assert outputs[-1].finished
    assert [c.finish_reason for c in outputs[-1].outputs] == ["abort", "abort"]
    await until_free(engine)
    await engine.shutdown()


@pytest.mark.req("REL-06")
async def test_slow_reader_gets_merged_outputs() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=DELTA, logprobs=0)
    outputs = []
    async for output in engine.generate("slow", params, "r1"):
        outputs.append(output)
        await until_free(engine)
    expected = expected_tokens("slow", params)
    assert [t for o in outputs for t in o.outputs[0].token_ids] == expected
    assert sum(len(o.outputs[0].logprobs or ()) for o in outputs) == 200
    assert len(outputs) <= 14, "outputs queued up instead of being merged"
    await engine.shutdown()


@pytest.mark.req("REL-06")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "simple"])
async def test_a_reader_that_is_behind_suspends_its_request(overlapped: bool, n: int) -> None:
    """Little is kept of what it has not taken, and it holds nothing that others could use."""
    turnstile = Turnstile(1)
    engine = make_engine(overlapped=overlapped, turnstile=turnstile)
    params = SamplingParams(
        max_tokens=400, ignore_eos=True, output_kind=DELTA, logprobs=1, n=n, seed=1
    )
    stream = engine.generate("slow", params, "slow")
    outputs = [await anext(stream)]
    for _ in range(3):
        # The core waits for the loop before each step: else it could compute all in one turn of the loop.
        await turnstile.go_on_until(
            lambda: is_free(engine)
        )  # no block, no seat, no place in the queue
        state = engine._processor.get("slow")
        assert state is not None
        assert not state.finished
        assert UNREAD_BYTES < state.num_untaken_bytes < n * 400 * (TOKEN_BYTES + ENTRY_BYTES) / 2
        turnstile.open()
        quick = SamplingParams(max_tokens=60, ignore_eos=True, output_kind=DELTA)
        found = await collect(engine, "quick", quick, "quick")
        assert [t for o in found for t in o.outputs[0].token_ids] == expected_tokens("quick", quick)
        await engine.check_health()
        turnstile.hold()
        outputs.append(await anext(stream))
    turnstile.open()
    outputs += [output async for output in stream]
    tokens: dict[int, list[int]] = {index: [] for index in range(n)}
    for part in (part for output in outputs for part in output.outputs):
        tokens[part.index] += part.token_ids
        assert len(part.logprobs or ()) == len(part.token_ids)
    assert [len(found) for found in tokens.values()] == [400] * n
    assert tokens[0] == expected_tokens("slow", params)
    await until_free(engine)
    await engine.shutdown()


@pytest.mark.req("REL-06")
async def test_one_that_goes_away_while_it_is_behind_leaves_nothing(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA, logprobs=1)
    stream = engine.generate("gone", params, "gone")
    await anext(stream)
    await until_free(engine)
    await stream.aclose()
    await until_free(engine)
    assert not engine._processor.states
    assert await engine.reset_prefix_cache()


async def test_readers_that_keep_up_are_never_suspended(engine: Engine) -> None:
    """Nor are requests whose output is whole in the end, or comes in large pieces."""
    suspended: list[Any] = []
    engine.client.suspend = suspended.append  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=300, ignore_eos=True, output_kind=DELTA, logprobs=3)
    whole = dataclasses.replace(params, output_kind=FINAL)
    await asyncio.gather(
        *(collect(engine, f"p{i}", params, f"r{i}") for i in range(8)),
        *(push_all(engine, f"pushed {i}", params) for i in range(4)),
        *(collect(engine, f"w{i}", whole, f"w{i}") for i in range(4)),
    )
    assert suspended == []


async def test_a_burst_is_no_sign_of_a_slow_reader() -> None:
    """Steps that end while the loop is busy come at once: who took the burst before keeps up."""
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    suspended: list[Any] = []
    engine.client.suspend = suspended.append  # type: ignore[method-assign]
    bursts = iter(range(2))
    publish, on_outputs, arrived = engine._publish, engine.on_outputs, []

    def busy(processed: Any) -> None:
        """The loop's turn takes as long as the core needs for 60 steps."""
        publish(processed)
        if next(bursts, None) is not None:
            wanted = len(arrived) + 60
            turnstile.release(60)
            wait_until(lambda: len(arrived) >= wanted)
        else:
            turnstile.release()

    def arrive(outputs: Any) -> None:
        on_outputs(outputs)
        arrived.append(outputs)

    engine._publish, engine.on_outputs = busy, arrive  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=150, ignore_eos=True, output_kind=DELTA, logprobs=3)
    outputs = await collect(engine, "p", params, "r")
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 150
    assert len(outputs) < 100, "there were no bursts"
    assert suspended == []
    await engine.shutdown()


async def test_a_large_interval_is_not_waited_for() -> None:
    """Nobody could take what is not ready: the request goes on until it is."""
    engine = make_engine(stream_interval=150)
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA, logprobs=3)
    outputs = await collect(engine, "p", params, "r")
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 400
    await engine.shutdown()


async def test_a_pause_that_waits_does_not_wait_for_readers(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA, logprobs=1)
    stream = engine.generate("slow", params, "slow")
    first = await anext(stream)
    await until_free(engine)
    async with asyncio.timeout(PATIENCE):
        await engine.pause_generation(wait_for_inflight_requests=True)
    outputs = [first, *[output async for output in stream]]
    tokens = [t for o in outputs for t in o.outputs[0].token_ids]
    assert tokens == expected_tokens("slow", params)
    await engine.resume_generation()


async def push_all(engine: Engine, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    """The first output by iteration, the others pushed, refusing every third."""
    stream = engine.generate(prompt, params, prompt)
    outputs = [await anext(stream)]

    def take(output: RequestOutput) -> bool:
        outputs.append(output)
        return len(outputs) % 3 != 0

    while not outputs[-1].finished:
        await stream.push(take)
    await stream.push(take)  # nothing is left: returns at once
    assert [output async for output in stream] == []
    return outputs


async def test_pushed_outputs_are_those_of_iteration(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, output_kind=DELTA)
    prompts = [f"pushed {i}" for i in range(16)]
    for prompt, outputs in zip(
        prompts, await asyncio.gather(*(push_all(engine, p, params) for p in prompts))
    ):
        expected = expected_tokens(prompt, params)
        assert [t for o in outputs for t in o.outputs[0].token_ids] == expected
        assert "".join(o.outputs[0].text for o in outputs) == text_of(expected)
    await until_free(engine)


@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "simple"])
@pytest.mark.parametrize("n", [1, 2])
async def test_text_is_pushed_without_outputs(overlapped: bool, n: int) -> None:
    """Whatever one completion says before its end; several, and log-probabilities, need outputs."""
    turnstile = Turnstile(0)
    engine = make_engine(turnstile=turnstile, overlapped=overlapped)
    loop = asyncio.get_running_loop()
    for logprobs in (None, 1):
        params = SamplingParams(
            max_tokens=40, ignore_eos=True, output_kind=DELTA, n=n, logprobs=logprobs
        )
        stream = engine.generate("text", params, f"text {logprobs}")
        turnstile.release()
        outputs, texts = [await anext(stream)], []
        loop.call_soon(turnstile.release, 39)  # once it is being pushed
        while not outputs[-1].finished:
            await stream.push(
                lambda output: outputs.append(output) is not None,  # noqa: B023
                lambda text, tokens: texts.append((text, tokens)) is None,  # noqa: B023
            )
        parts = [part for output in outputs for part in output.outputs]
        assert sum(len(part.token_ids) for part in parts) + sum(t for _, t in texts) == 40 * n
        if n == 1 and logprobs is None:
            assert texts
            text = parts[0].text + "".join(t for t, _ in texts) + "".join(p.text for p in parts[1:])
            assert text == text_of(expected_tokens("text", params))
        else:
            assert not texts
    await engine.shutdown()


async def test_pushing_switches_no_task() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    params = SamplingParams(max_tokens=50, ignore_eos=True, output_kind=DELTA)
    stream, tasks = engine.generate("p", params, "r"), set()
    await anext(stream)
    asyncio.get_running_loop().call_soon(turnstile.release, 100)  # once it is being pushed

    def take(output: RequestOutput) -> bool:
        tasks.add(asyncio.current_task())
        return True

    await stream.push(take)
    assert tasks - {asyncio.current_task()} == {None}, "called by the loop, not by a task"
    await engine.shutdown()


async def test_a_refusal_lets_outputs_merge() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=DELTA)
    stream = engine.generate("slow", params, "r")
    outputs = [await anext(stream)]
    while not outputs[-1].finished:
        await until_free(engine)
        await stream.push(lambda output: outputs.append(output) is not None)
    assert [t for o in outputs for t in o.outputs[0].token_ids] == expected_tokens("slow", params)
    assert len(outputs) <= 3
    await engine.shutdown()


async def test_pushing_raises_what_goes_wrong() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)
    with pytest.raises(RuntimeError, match="by iterating"):
        await engine.generate("x", params, "x").push(lambda _: True)

    def broken(output: RequestOutput) -> bool:
        raise ZeroDivisionError

    stream = engine.generate("y", params, "y")
    await anext(stream)
    turnstile.release()
    with pytest.raises(ZeroDivisionError):
        await stream.push(broken)
    await stream.aclose()
    cancelled = asyncio.create_task(push_all(engine, "cancelled", params))
    await until_held(engine, 1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    turnstile.open()
    await until_free(engine)
    turnstile.hold()
    doomed = asyncio.create_task(push_all(engine, "doomed", params))
    fatal = SamplingParams(max_tokens=400, ignore_eos=True, extra_args={"die_at": 10})
    dying = asyncio.create_task(collect(engine, "fatal", fatal, "fatal"))
    await until_held(engine, 2)
    turnstile.open()
    with pytest.raises(EngineDead, match="died as told"):
        await dying
    with pytest.raises(EngineDead):
        async with asyncio.timeout(PATIENCE):
            await doomed
    await engine.shutdown()


async def test_stream_interval_first_and_last_at_once() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(stream_interval=10, turnstile=turnstile)
    params = SamplingParams(max_tokens=35, ignore_eos=True, output_kind=DELTA)
    sizes = []
    async for output in engine.generate("interval", params, "r"):
        sizes.append(len(output.outputs[0].token_ids))
        turnstile.release(100)
    assert sizes[0] == 1
    assert sum(sizes) == 35
    assert all(size >= 10 for size in sizes[1:-1])
    await engine.shutdown()


async def test_several_completions(engine: Engine) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=25, ignore_eos=True, prompt_logprobs=0)
    last = (await collect(engine, "many", params, "r1"))[-1]
    assert [c.index for c in last.outputs] == [0, 1, 2]
    assert len({c.text for c in last.outputs}) == 3
    assert last.outputs[0].token_ids == expected_tokens("many", params)
    assert last.prompt_logprobs is not None
    assert last.prompt_logprobs[0] is None
    assert [next(iter(p)) for p in last.prompt_logprobs[1:] if p] == [ord(c) for c in "any"]
    again = (await collect(engine, "many", params, "r2"))[-1]
    assert [c.text for c in again.outputs] == [c.text for c in last.outputs]


async def test_finish_and_stop_reasons(engine: Engine) -> None:
    def last_of(outputs: list[RequestOutput]) -> tuple[str | None, object, str]:
        completion = outputs[-1].outputs[0]
        return completion.finish_reason, completion.stop_reason, completion.text

    base = SamplingParams(max_tokens=60, ignore_eos=True)
    tokens = expected_tokens("reasons", base)
    text = text_of(tokens)
    assert last_of(await collect(engine, "reasons", base, "a")) == ("length", None, text)
    stop = text[10:13]
    at = text.index(stop)
    by_string = SamplingParams(max_tokens=60, ignore_eos=True, stop=["zzzzzz", stop])
    assert last_of(await collect(engine, "reasons", by_string, "b")) == ("stop", stop, text[:at])
    kept = SamplingParams(
        max_tokens=60, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )
    assert last_of(await collect(engine, "reasons", kept, "c"))[2] == text[: at + 3]
    by_id = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=[tokens[7]])
    reason = last_of(await collect(engine, "reasons", by_id, "d"))
    assert reason == ("stop", tokens[7], text[: tokens.index(tokens[7]) + 1])
    ended = next(
        p for p in (f"end{i}" for i in range(500))
        if EOS in expected_tokens(p, SamplingParams(max_tokens=60))
    )  # fmt: skip
    by_eos = last_of(await collect(engine, ended, SamplingParams(max_tokens=60), "e"))
    assert by_eos[:2] == ("stop", None)
    assert "</s>" not in by_eos[2]
    await until_free(engine)


async def test_logprobs_flat_and_listed(engine: Engine) -> None:
    def params(flat: bool) -> SamplingParams:
        return SamplingParams(
            max_tokens=9, ignore_eos=True, logprobs=3, prompt_logprobs=1, flat_logprobs=flat
        )

    listed = (await collect(engine, "probs", params(False), "a"))[-1]
    flat = (await collect(engine, "probs", params(True), "b"))[-1]
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert flat.outputs[0].logprobs == listed.outputs[0].logprobs
    assert flat.prompt_logprobs == listed.prompt_logprobs
    assert listed.outputs[0].cumulative_logprob == pytest.approx(-0.25 * 9)
    position = listed.outputs[0].logprobs[0]
    assert position is not None
    assert [e.rank for e in position.values()] == [1, 2, 3]
    assert next(iter(position.values())).decoded_token == listed.outputs[0].text[0]


async def test_cached_tokens_and_metrics(engine: Engine) -> None:
    prompt = "a prompt that is long enough for blocks"
    first = (await collect(engine, prompt, SamplingParams(max_tokens=4), "a"))[-1]
    second = (await collect(engine, prompt, SamplingParams(max_tokens=4), "b"))[-1]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    metrics = second.metrics
    assert metrics is not None
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.num_generation_tokens == len(second.outputs[0].token_ids)
    salted = {"prompt": prompt, "cache_salt": "mine"}
    assert (await collect(engine, salted, SamplingParams(), "c"))[-1].num_cached_tokens == 0


@pytest.mark.req("REL-01")
@pytest.mark.parametrize("failure", ["fail_at", "raise_at"])
async def test_a_failing_request_does_not_stop_others(engine: Engine, failure: str) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    bad = SamplingParams(max_tokens=60, ignore_eos=True, extra_args={failure: 5})
    good = [asyncio.create_task(collect(engine, f"g{i}", params, f"g{i}")) for i in range(7)]
    with pytest.raises(GenerateError, match="as told"):
        await collect(engine, "bad", bad, "bad")
    results = await asyncio.gather(*good, return_exceptions=True)
    for index, outputs in enumerate(results):
        assert not isinstance(outputs, BaseException)
        assert outputs[-1].outputs[0].token_ids == expected_tokens(f"g{index}", params)
    after = await collect(engine, "after", params, "after")
    assert after[-1].outputs[0].token_ids == expected_tokens("after", params)
    await until_free(engine)


@pytest.mark.req("REL-03")
async def test_death_ends_every_stream() -> None:
    turnstile = Turnstile()
    engine = make_engine(turnstile=turnstile)
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    streams = [asyncio.create_task(collect(engine, f"s{i}", long, f"s{i}")) for i in range(8)]
    fatal = SamplingParams(max_tokens=400, ignore_eos=True, extra_args={"die_at": 10})
    dying = asyncio.create_task(collect(engine, "fatal", fatal, "fatal"))
    await until_held(engine, 9)
    turnstile.open()
    with pytest.raises(EngineDead, match="died as told"):
        await dying
    async with asyncio.timeout(PATIENCE):
        ended = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(e, EngineDead) for e in ended)
    assert isinstance(engine.dead_error, EngineDead)
    with pytest.raises(EngineDead):
        await engine.check_health()
    with pytest.raises(EngineDead):
        await collect(engine, "late", long, "late")
    with pytest.raises(EngineDead):
        await engine.stats()
    await engine.shutdown()


class Stuck:
    """An engine in the middle of a step, and how long that takes, by the engine's clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.turnstile = Turnstile(0)

    @classmethod
    async def made(cls, config: EngineConfig, largest_step: float = 0.0, **options: Any) -> Stuck:
        self = cls()

        def build(_: Any) -> Any:
            core = make_core(turnstile=self.turnstile)
            core.step_seconds = largest_step
            return core

        client = InprocClient(build)
        self.engine = Engine(
            client, InputProcessor(CharTokenizer(), served_model()), config, **options
        )
        loop: Any = client._loop
        loop._clock = lambda: self.seconds
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        self.task = asyncio.create_task(collect(self.engine, "stuck", params, "r"))
        await until(lambda: bool(loop._in_flight))
        return self

    async def end(self) -> None:
        """It goes on after all, and is healthy."""
        self.turnstile.release(100)
        await self.task
        await self.engine.check_health()
        await self.engine.shutdown()


@pytest.mark.req("REL-02")
async def test_a_step_may_take_four_times_the_largest_one_at_start() -> None:
    config = EngineConfig(observability=ObservabilityConfig(heartbeat_limit=0.05))
    stuck = await Stuck.made(config, largest_step=0.1)
    stuck.seconds = 0.3
    await stuck.engine.check_health()
    stuck.seconds = 0.5
    with pytest.raises(EngineDead, match=r"limit.*0\.4|0\.4 s"):
        await stuck.engine.check_health()
    await stuck.end()


@pytest.mark.req("REL-02")
async def test_a_stuck_step_is_unhealthy() -> None:
    stuck = await Stuck.made(EngineConfig(), heartbeat_limit=0.1)
    await stuck.engine.check_health()
    stuck.seconds = 0.3
    with pytest.raises(EngineDead, match="no progress"):
        await stuck.engine.check_health()
    await stuck.end()


async def test_queue_full() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(max_queued=2, max_num_seqs=1, turnstile=turnstile)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    first = engine.generate("a", params, "a")
    await anext(first)
    waiting = [asyncio.create_task(collect(engine, "b", params, f"b{i}")) for i in range(2)]
    await until_held(engine, 3)
    with pytest.raises(QueueFull) as caught:
        await collect(engine, "c", params, "c")
    assert 0 < caught.value.retry_after <= 60
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await first.aclose()
    turnstile.release(1000)
    await until_free(engine)
    await engine.shutdown()


@pytest.mark.req("REL-07")
async def test_the_queue_is_bounded_in_tokens_too() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(max_queued_tokens=20, max_num_seqs=1, turnstile=turnstile)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    first = engine.generate("a" * 30, params, "a")  # nobody waits: taken, however long
    await anext(first)
    waiting = [asyncio.create_task(collect(engine, "b" * 15, params, "b"))]
    await until_held(engine, 2)
    with pytest.raises(QueueFull, match="max_queued_tokens = 20") as caught:
        await collect(engine, "c" * 6, params, "c")
    assert 1 <= caught.value.retry_after <= 60
    waiting.append(asyncio.create_task(collect(engine, "d" * 5, params, "d")))
    await until_held(engine, 3)
    assert not waiting[-1].done()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await first.aclose()
    turnstile.release(1000)
    await until_free(engine)
    assert engine._processor.num_waiting_tokens == 0
    await engine.shutdown()


@pytest.mark.req("REL-22")
@pytest.mark.parametrize("prompt", ["x", "x" * 3000])
async def test_a_request_s_owner_is_who_is_served(prompt: str) -> None:
    """Also when it is prepared in another thread."""
    engine = make_engine(max_num_seqs=1)
    owners = []
    add = engine.client.add
    engine.client.add = lambda requests: (owners.extend(r.owner for r in requests), add(requests))  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=10)

    async def serve(owner: str) -> None:
        OWNER.set(owner)
        await collect(engine, prompt, params, owner)

    await asyncio.gather(*(asyncio.create_task(serve(owner)) for owner in ("ann", "bob")))
    assert sorted(owners) == ["ann", "bob"]
    await engine.shutdown()


async def test_wrong_requests_raise_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(PromptTooLong):
        await collect(engine, "x" * 513, SamplingParams(), "a")
    with pytest.raises(RequestError):
        await collect(engine, "", SamplingParams(), "b")
    stream = engine.generate("x", SamplingParams(max_tokens=300, ignore_eos=True), "same")
    await anext(stream)
    with pytest.raises(RequestError, match="same"):
        await collect(engine, "y", SamplingParams(), "same")
    await stream.aclose()
    await until_free(engine)


async def test_two_requests_one_after_the_other_may_share_an_id(engine: Engine) -> None:
    for _ in range(50):
        stream = engine.generate("x", SamplingParams(max_tokens=300, ignore_eos=True), "same")
        await anext(stream)
        await stream.aclose()
    outputs = await collect(engine, "x", SamplingParams(max_tokens=5, ignore_eos=True), "same")
    expected = expected_tokens("x", SamplingParams(max_tokens=5, ignore_eos=True))
    assert outputs[-1].outputs[0].token_ids == expected
    await until_free(engine)


@pytest.mark.parametrize("overlapped", [True, False])
async def test_reset_prefix_cache(overlapped: bool) -> None:
    turnstile = Turnstile(10)
    engine = make_engine(turnstile=turnstile, overlapped=overlapped)

    async def reset(**options: bool) -> bool:
        """Ask, and let the request run on for a few steps, in which it does not end."""
        asked = asyncio.ensure_future(engine.reset_prefix_cache(**options))
        await asyncio.sleep(0)
        turnstile.release(10)
        return await asked

    params = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = engine.generate("reset me", params, "r")
    await anext(stream)
    assert await reset() is False
    assert await reset(reset_running_requests=True) is True
    turnstile.release(1000)
    last = [output async for output in stream][-1]
    assert last.outputs[0].token_ids == expected_tokens("reset me", params)
    assert await engine.reset_prefix_cache() is True
    await engine.shutdown()


async def test_preemption_changes_nothing() -> None:
    engine = make_engine(num_blocks=40, max_num_seqs=16)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    results = await asyncio.gather(*(collect(engine, f"p{i}", params, f"r{i}") for i in range(8)))
    for index, outputs in enumerate(results):
        assert outputs[-1].outputs[0].token_ids == expected_tokens(f"p{index}", params)
    stats = await engine.stats()
    assert stats.num_preemptions > 0
    assert sum(r[-1].metrics.num_preemptions for r in results if r[-1].metrics) > 0
    await engine.shutdown()


async def test_tokenize_and_chat(engine: Engine) -> None:
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    found = await engine.tokenize(chat, strings=True)
    assert "".join(found.token_strings or ()) == "user: hi\n"
    assert await engine.detokenize(found.token_ids) == "user: hi\n"
    large = await engine.tokenize("x" * 50_000)
    assert len(large.token_ids) == 50_000
    outputs = await collect(engine, chat, SamplingParams(max_tokens=5), "chat")
    assert outputs[-1].prompt == "user: hi\n"


async def test_shutdown_drains_then_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    turnstile = Turnstile()
    engine = make_engine(turnstile=turnstile)
    aborted, now = asyncio.Event(), 0.0
    monkeypatch.setattr(
        engine_module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time)
    )
    abort = engine.abort

    async def watched(request_ids: Any) -> None:
        await abort(request_ids)
        aborted.set()

    monkeypatch.setattr(engine, "abort", watched)
    quick = asyncio.create_task(
        collect(engine, "q", SamplingParams(max_tokens=2, ignore_eos=True), "q")
    )
    slow = asyncio.create_task(
        collect(engine, "s", SamplingParams(max_tokens=500, ignore_eos=True), "s")
    )
    await until_held(engine, 2)
    ending = asyncio.create_task(engine.shutdown(drain_timeout=1000))
    turnstile.release(5)
    assert (await quick)[-1].outputs[0].finish_reason == "length"
    assert not aborted.is_set()
    now = 1001.0
    await aborted.wait()
    turnstile.open()
    await ending
    assert (await slow)[-1].outputs[0].finish_reason == "abort"
    with pytest.raises(EngineDead):
        await collect(engine, "late", SamplingParams(), "late")
    await engine.shutdown()


@pytest.mark.req("REL-05")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlapped", [True, False])
async def test_random_lives(seed: int, overlapped: bool) -> None:
    """Requests that end in every possible way, at random, in a cache that is too small for all."""
    engine = make_engine(overlapped=overlapped, num_blocks=60, max_num_seqs=12)
    rng = random.Random(seed)

    async def live(index: int) -> None:
        for _ in range(rng.randrange(200)):
            await asyncio.sleep(0)
        fate = rng.choice(["whole", "whole", "close", "cancel", "abort", "fail", "stop"])
        params = SamplingParams(
            max_tokens=rng.randint(1, 60),
            ignore_eos=True,
            n=rng.choice([1, 1, 3]),
            seed=index,
            stop=["a", "e"] if fate == "stop" else None,
            extra_args={"fail_at": rng.randint(0, 20)} if fate == "fail" else None,
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        stream = engine.generate(f"life {index}", params, f"r{index}")
        seen = 0
        try:
            async for output in stream:
                seen += 1
                if fate == "close" and seen > 2:
                    await stream.aclose()
                elif fate == "abort" and seen == 2:
                    await engine.abort([f"r{index}"])
                if fate == "whole" and output.finished and params.output_kind is not DELTA:
                    expected = expected_tokens(f"life {index}", params)
                    assert output.outputs[0].token_ids == expected
        except GenerateError:
            assert fate == "fail"

    tasks = [asyncio.create_task(live(i)) for i in range(40)]
    await until(lambda: any(task.done() for task in tasks))
    for task in tasks[::9]:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), repr(outcome)
    await until_free(engine)
    assert engine._processor.num_waiting == 0
    assert engine._processor.states == []
    await engine.check_health()
    await engine.shutdown()


async def test_death_and_shutdown_reach_who_waits_at_the_gate() -> None:
    for end in ("death", "shutdown"):
        engine = make_engine()
        await engine.pause_generation()
        waiting = asyncio.create_task(anext(engine.generate("x", SamplingParams(), "r")))
        await until_waiting(engine, 1)
        if end == "death":
            engine.on_death(EngineDead("killed"))
        else:
            await engine.shutdown()
        with pytest.raises(EngineDead):
            async with asyncio.timeout(PATIENCE):
                await waiting
        await engine.shutdown()


async def test_the_queue_limit_counts_who_waits_at_the_gate() -> None:
    engine = make_engine(max_queued=2)
    await engine.pause_generation()
    waiting = [
        asyncio.create_task(anext(engine.generate("x", SamplingParams(), f"r{i}")))
        for i in range(2)
    ]
    await until_waiting(engine, 2)
    with pytest.raises(QueueFull):
        await anext(engine.generate("x", SamplingParams(), "too many"))
    await engine.resume_generation()
    await asyncio.gather(*waiting)
    await engine.shutdown()


async def test_pausing_does_not_wait_for_who_does_not_read() -> None:
    turnstile = Turnstile(1)
    engine = make_engine(turnstile=turnstile)
    stream = engine.generate("x", SamplingParams(max_tokens=500, ignore_eos=True), "r")
    await anext(stream)  # and then no more
    pausing = asyncio.create_task(engine.pause_generation())
    await until(engine.is_paused)  # and the abort is on its way
    turnstile.open()
    async with asyncio.timeout(PATIENCE):
        await pausing
    assert (await engine.stats()).kv_cache_usage == 0
    last = [output async for output in stream][-1]
    assert last.outputs[0].finish_reason == "abort"
    await engine.shutdown()


async def test_who_is_being_taken_in_at_shutdown_hears_of_it() -> None:
    engine = make_engine()
    may_encode = threading.Event()
    encode = engine.tokenizer.encode
    encoding: list[Any] = []

    def held_up(*args: Any, **kwargs: Any) -> Any:
        encoding.append(args)
        return may_encode.wait(PATIENCE) and encode(*args, **kwargs)

    engine.tokenizer.encode = held_up
    long = "x" * 3000
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
    coming = [asyncio.create_task(collect(engine, long, params, f"r{i}")) for i in range(4)]
    await until(lambda: bool(encoding))
    await engine.shutdown()
    may_encode.set()
    ends = await asyncio.gather(*coming, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDead] * 4
    with pytest.raises(EngineDead):
        await engine.tokenize(long)


@pytest.mark.parametrize("large", ["x" * 4000, None], ids=["content", "tool call"])
async def test_long_chats_are_not_read_on_the_event_loop(large: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}" * 4000}}
    message = {"role": "assistant", "content": large}
    if large is None:
        message["tool_calls"] = [call]
    threads, seen = InputThreads(None, 1), []
    await threads.run(ChatPrompt([message]), lambda: seen.append(threading.current_thread()))
    threads.close()
    assert seen[0] is not threading.current_thread()


@pytest.mark.req("REL-07")
async def test_the_queue_limit_counts_who_is_being_taken_in() -> None:
    engine = make_engine(max_queued=2)
    may_encode = threading.Event()
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda *a, **k: may_encode.wait(PATIENCE) and encode(*a, **k)
    long = "x" * 3000  # taken in by another thread
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
    coming = [asyncio.create_task(collect(engine, long, params, f"r{i}")) for i in range(4)]
    await until(lambda: sum(task.done() for task in coming) >= 2)
    refused = [task for task in coming if task.done()]
    assert [type(task.exception()) for task in refused] == [QueueFull] * 2
    may_encode.set()
    await asyncio.gather(*coming, return_exceptions=True)
    assert await collect(engine, "x", params, "later")
    await engine.shutdown()


def test_settings_leave_the_token_out() -> None:
    config = EngineConfig(model=ModelConfig(hf_token="canary"))
    assert "canary" not in str(plain_settings(config))
    assert plain_settings(config)["scheduler"]["policy"] == "fcfs"


async def test_requests_of_a_paused_engine_outlive_its_sleep() -> None:
    engine = make_engine(sleep_mode=True)
    await engine.pause_generation()
    await engine.collective_rpc("sleep", args=[1])
    waiting = asyncio.create_task(collect(engine, "x", SamplingParams(), "waits"))
    await until_waiting(engine, 1)
    await engine.collective_rpc("wake_up", args=[None])
    await engine.resume_generation()
    async with asyncio.timeout(PATIENCE):
        assert (await waiting)[-1].outputs[0].token_ids
    await engine.collective_rpc("sleep", args=[2])
    assert (await engine.stats()).sleep_level == 2
    with pytest.raises(EngineAsleep, match=r"the engine sleeps \(weights, kv_cache\)"):
        await anext(engine.generate("x", SamplingParams(), "refused"))
    await engine.shutdown()
