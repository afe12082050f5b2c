"""Outputs tell which weights computed them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from engine_fakes import (
    PATIENCE,
    CharTokenizer,
    Turnstile,
    make_core,
    served_model,
)

from headrace_core.errors import RequestError
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.weights.version import WeightsVersion

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
MakeEngine = Callable[..., Engine]


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        client = InprocClient(lambda _: make_core(step_seconds=PATIENCE, **settings))
        made.append(Engine(client, InputProcessor(CharTokenizer(), served_model())))
        return made[-1]

    yield make
    for engine in made:
        await engine.shutdown()


async def collect(engine: Engine, prompt: str, name: str = "r", **params: Any) -> Any:
    settings = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
    return [output async for output in engine.generate(prompt, settings, name)]


async def change(engine: Engine, version: object) -> None:
    assert await engine.collective_rpc("set_weights_version", args=[version]) == []


@pytest.mark.parametrize("overlapped", [True, False])
async def test_outputs_tell_the_version(make_engine: MakeEngine, overlapped: bool) -> None:
    engine = make_engine(overlapped=overlapped)
    outputs = await collect(engine, "x")
    assert {one.weights_versions for one in outputs} == {("0",)}
    await change(engine, "step 600")
    assert await engine.collective_rpc("weights_version") == ["step 600"]
    assert (await engine.stats()).weights_version == "step 600"
    (last,) = await collect(engine, "x", output_kind=FINAL, n=3)
    assert (last.weights_version, last.weights_versions) == ("step 600", ("step 600",))
    beams = await engine.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=3), "beams")
    assert beams.weights_versions == ("step 600",)


async def test_a_request_that_goes_on_with_other_weights_tells_both(
    make_engine: MakeEngine,
) -> None:
    turnstile = Turnstile()
    engine = make_engine(turnstile=turnstile, overlapped=False)
    params = SamplingParams(max_tokens=9, ignore_eos=True, output_kind=DELTA)
    stream = engine.generate("x", params, "r")
    turnstile.release(1)
    merged: RequestOutput = await anext(stream)
    assert merged.weights_versions == ("0",)
    changing = engine.collective_rpc("set_weights_version", args=["1"])
    turnstile.open()
    await changing
    async for output in stream:
        merged.add(output, aggregate=True)
    assert len(merged.outputs[0].token_ids) == 9
    assert merged.weights_version == "0"
    assert merged.weights_versions == ("0", "1")


async def test_a_prompt_computed_by_two_versions_tells_both(make_engine: MakeEngine) -> None:
    """Although no token came before the change."""
    turnstile = Turnstile(math.inf)
    engine = make_engine(turnstile=turnstile, max_num_batched_tokens=8, max_num_seqs=8)
    await collect(
        engine, "a step or two", max_tokens=2
    )  # the loop hears calls during steps from now on
    turnstile.hold()
    before = (await engine.stats()).iteration_tokens
    running = asyncio.ensure_future(collect(engine, "a prompt of many steps" * 10, max_tokens=2))

    async def has_begun() -> bool:
        return (await engine.stats()).iteration_tokens >= before + 16

    await turnstile.go_on_until(has_begun)
    late = asyncio.ensure_future(collect(engine, "x", "late"))
    changing = asyncio.ensure_future(change(engine, "1"))
    await turnstile.go_on_until(changing.done)
    assert not running.done()
    turnstile.open()
    assert (await running)[0].weights_versions == ("0", "1")
    assert (await late)[0].weights_versions == ("1",)


async def test_nothing_that_other_weights_computed_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = "the very same prompt"
    await collect(engine, prompt)
    assert (await collect(engine, prompt))[-1].num_cached_tokens == 16
    await change(engine, "1")
    assert (await collect(engine, prompt))[-1].num_cached_tokens == 0
    assert (await collect(engine, prompt))[-1].num_cached_tokens == 16
    await change(engine, "1")  # weights may have changed under a name that stays
    assert (await collect(engine, prompt))[-1].num_cached_tokens == 0


@pytest.mark.parametrize("version", ["", "x" * 129, "a\nb", 7, None])
async def test_what_is_no_version(make_engine: MakeEngine, version: object) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=r"weights_version = .*1 to 128 printable characters"):
        await engine.collective_rpc("set_weights_version", args=[version])
    assert await engine.collective_rpc("weights_version") == ["0"]


def test_versions_before_are_said_once() -> None:
    weights = WeightsVersion()
    weights.change("1", ["a", "b"])
    weights.change("2", ["b"])
    outputs = ["b", "c"]
    assert weights.take_earlier(outputs) == {"b": ["0", "1"]}
    assert weights.take_earlier(outputs) is None
    assert weights.take_earlier(["a"]) == {"a": ["0"]}
