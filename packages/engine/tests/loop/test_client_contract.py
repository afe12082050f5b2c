"""What every EngineClient does: the real one and the fake that other packages test with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_fakes import PATIENCE, CharTokenizer, make_core, served_model

from headrace_core.engine import EngineClient
from headrace_core.errors import EngineDead, PromptTooLong, RequestError
from headrace_core.request import ChatPrompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.testing.engine import FakeEngine, fake_served_model
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.engine import Engine
from headrace_engine.intake.intake import Intake

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
LONG = "a fairly long answer that goes on and on, with some letters and some more, " * 4


@pytest_asyncio.fixture(params=["real", "fake"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    made: EngineClient
    if request.param == "real":
        made = Engine(
            InprocClient(lambda _: make_core(step_seconds=0.005)),
            Intake(CharTokenizer(), served_model()),
        )
    else:
        made = FakeEngine(
            LONG, model=fake_served_model(max_model_len=512), delay=0.001, first_delay=0.001
        )
    yield made
    await made.shutdown()


async def collect(client: EngineClient, prompt: Any, request_id: str = "r", **params: Any) -> Any:
    params = {"max_tokens": 30, "ignore_eos": True, **params}
    stream = client.generate(prompt, SamplingParams(**params), request_id)
    return [output async for output in stream]


async def test_kinds_agree(client: EngineClient) -> None:
    whole = await collect(client, "x")
    deltas = await collect(client, "x", output_kind=DELTA)
    final = await collect(client, "x", output_kind=FINAL)
    assert len(final) == 1
    assert final[0].outputs == whole[-1].outputs
    merged = deltas[0]
    for later in deltas[1:]:
        merged.add(later, aggregate=True)
    assert merged.outputs == whole[-1].outputs
    assert [o.finished for o in whole] == [False] * (len(whole) - 1) + [True]
    assert final[0].outputs[0].finish_reason == "length"
    assert final[0].request_id == "r"
    assert final[0].prompt == "x"


async def test_stop_strings(client: EngineClient) -> None:
    text = (await collect(client, "x"))[-1].outputs[0].text
    stop = text[9:12]
    for keep in (False, True):
        deltas = await collect(
            client, "x", stop=[stop], include_stop_str_in_output=keep, output_kind=DELTA
        )
        shown = "".join(c.text for o in deltas for c in o.outputs)
        assert shown == text[: text.index(stop) + 3 * keep]
        last = deltas[-1].outputs[-1]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)


async def test_several_completions_with_log_probabilities(client: EngineClient) -> None:
    outputs = await collect(client, "xyz", n=2, logprobs=2, prompt_logprobs=1, seed=1)
    last = outputs[-1]
    assert [c.index for c in last.outputs] == [0, 1]
    for completion in last.outputs:
        assert len(completion.logprobs) == len(completion.token_ids) == 30
        for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(position)) == token
    assert last.prompt_logprobs[0] is None
    assert len(last.prompt_logprobs) == 3


async def test_abort_and_close(client: EngineClient) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)
    stream = client.generate("x", params, "r")
    await anext(stream)
    await client.abort(["r", "other"])
    rest = [output async for output in stream]
    assert rest[-1].finished
    assert rest[-1].outputs[0].finish_reason == "abort"
    closed = client.generate("x", params, "r")
    await anext(closed)
    with pytest.raises(RequestError):
        await anext(client.generate("x", params, "r"))
    await closed.aclose()
    task = asyncio.create_task(collect(client, "x", "r", max_tokens=400))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(PATIENCE):
        while (await client.stats()).num_requests_running:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, RequestError),
        ("x" * 600, {}, PromptTooLong),
        ("x" * 500, {"max_tokens": 100}, PromptTooLong),
        ("x", {"logprobs": 21}, RequestError),
    ],
)
async def test_refusals(
    client: EngineClient, prompt: str, params: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await collect(client, prompt, **params)


async def test_tokens_and_texts(client: EngineClient) -> None:
    found = await client.tokenize("abc", strings=True)
    assert found.token_ids == [97, 98, 99]
    assert found.token_strings == ["a", "b", "c"]
    assert await client.detokenize([97, 98]) == "ab"
    chat = await client.tokenize(ChatPrompt([{"role": "user", "content": "hello"}]))
    assert "hello" in await client.detokenize(chat.token_ids)


async def test_health_reset_and_shutdown(client: EngineClient) -> None:
    await client.check_health()
    assert await client.reset_prefix_cache() is True
    await client.shutdown()
    assert client.model.max_model_len == 512


@pytest.mark.spec("ENGINE-ASYNC")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("clear", [False, True])
async def test_pause(client: EngineClient, waits: bool, clear: bool) -> None:
    running = [asyncio.create_task(collect(client, "x", f"r{i}", max_tokens=200)) for i in range(3)]
    async with asyncio.timeout(PATIENCE):
        while (await client.stats()).num_requests_running < 3:
            await asyncio.sleep(0.002)
    assert not await client.is_paused()
    await client.pause_generation(wait_for_inflight_requests=waits, clear_cache=clear)
    assert await client.is_paused()
    await client.check_health()
    for outputs in await asyncio.gather(*running):
        assert outputs[-1].outputs[0].finish_reason == ("length" if waits else "abort")
    stats = await client.stats()
    assert stats.num_requests_running == 0
    assert stats.num_free_blocks == stats.num_blocks

    held = asyncio.create_task(collect(client, "x", "held"))
    gone = asyncio.create_task(collect(client, "x", "gone"))
    with pytest.raises(RequestError):
        await collect(client, "", "refused")
    await asyncio.sleep(0.05)
    assert not held.done()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await client.resume_generation()
    assert not await client.is_paused()
    assert (await held)[-1].outputs[0].finish_reason == "length"
    await client.resume_generation()


async def test_resuming_ends_a_pause_that_waits(client: EngineClient) -> None:
    running = asyncio.create_task(collect(client, "x", "r", max_tokens=300))
    async with asyncio.timeout(PATIENCE):
        while not (await client.stats()).num_requests_running:
            await asyncio.sleep(0.002)
    pausing = asyncio.create_task(client.pause_generation(wait_for_inflight_requests=True))
    await asyncio.sleep(0.02)
    assert not pausing.done()
    await client.resume_generation()
    async with asyncio.timeout(PATIENCE):
        await pausing
    assert len((await running)[-1].outputs[0].token_ids) == 300


async def test_calls_of_workers(client: EngineClient) -> None:
    assert await client.collective_rpc("report") == [{"rank": 0}]
    for method, args in (("close", ()), ("execute", ()), ("report", (1,)), ("__init__", ())):
        with pytest.raises(RequestError):
            await client.collective_rpc(method, args=args)
    assert "profiler_config" in client.settings


async def test_the_fake_plays_its_script() -> None:
    gate = asyncio.Event()
    fake = FakeEngine(["one", "two"], gate=gate)
    task = asyncio.create_task(collect(fake, "x", n=2, seed=1, ignore_eos=False))
    await asyncio.sleep(0.01)
    assert fake.num_running == 1
    gate.set()
    assert [c.text for c in (await task)[-1].outputs] == ["one", "two"]
    assert fake.requests[0].params.n == 2
    assert fake.finished == ["r"]
    assert fake.num_running == 0
    dying = FakeEngine("a long text", die_after=3)
    with pytest.raises(EngineDead):
        await collect(dying, "x")
    with pytest.raises(EngineDead):
        await dying.check_health()
    assert dying.num_running == 0
