"""A swap of weights in the core: who waits, who ends first, and what leaves the old weights in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_fakes import (
    PATIENCE,
    CharTokenizer,
    FakeExecutor,
    Turnstile,
    expected_tokens,
    make_core,
    served_model,
)

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineAsleep, EngineError, RequestError, UnsupportedFeature
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.core import EngineCore
from headrace_engine.engine import Engine
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.uniproc import UniProcExecutor
from headrace_engine.weights.order import SwapOrder
from headrace_testing.waiting import until

FACTS = {"bytes": 7, "perplexity": None}


class Swapping:
    """An engine whose steps and readings the test holds."""

    def __init__(self) -> None:
        self.turnstile = Turnstile()
        self.core: EngineCore = make_core(turnstile=self.turnstile, step_seconds=PATIENCE)
        self.engine = Engine(
            InprocClient(lambda _: self.core), InputProcessor(CharTokenizer(), served_model())
        )

    @property
    def executor(self) -> FakeExecutor:
        assert isinstance(self.core.executor, FakeExecutor)
        return self.core.executor

    def ask(self, prompt: str, length: int = 3, **params: Any) -> asyncio.Task[Any]:
        """The last output of a request."""
        settings = SamplingParams(max_tokens=length, ignore_eos=True, **params)

        async def last() -> Any:
            return [o async for o in self.engine.generate(prompt, settings, prompt)][-1]

        return asyncio.create_task(last())

    def swap(self, **options: Any) -> asyncio.Task[Any]:
        called = self.engine.collective_rpc("swap_weights", args=[{"path": "/new", **options}])
        return asyncio.create_task(called)

    async def stats(self) -> EngineStats:
        return await self.engine.stats()

    async def begun(self, count: int = 1) -> None:
        """So many swaps have begun to read."""
        await until(lambda: len(self.executor.beside) >= count)

    async def read(self, error: Exception | None = None) -> None:
        """The weights of the last swap are read."""
        await self.begun()
        future = self.executor.beside[-1][1]
        if error is None:
            future.set_result([dict(FACTS)])
        else:
            future.set_exception(error)


@pytest.fixture
async def swapping() -> AsyncIterator[Swapping]:
    made = Swapping()
    made.turnstile.open()
    await made.ask("warm")  # from now on the loop hears calls during steps
    made.turnstile.hold()
    made.executor.worker.calls.clear()
    yield made
    made.turnstile.open()
    await made.engine.shutdown()


async def test_who_runs_ends_first_and_who_comes_waits(swapping: Swapping) -> None:
    turnstile, told = swapping.turnstile, swapping.executor.worker.calls
    running = swapping.ask("runs", 300)  # more than steps pass before the test hears that "early" ended
    await turnstile.go_on_until_running(swapping.engine, 1)
    swap = swapping.swap(weights_version="new")
    await swapping.begun()
    assert swapping.executor.beside[0][0] == ("build_beside", "/new", (), None)
    early = swapping.ask("early")
    await turnstile.go_on_until(early.done)  # while weights are read, all goes on
    assert not running.done()
    await swapping.read()

    async def drains() -> bool:
        await swapping.stats()
        return swapping.core.swap.ends is not None

    await until(drains)
    late, gone = swapping.ask("late"), swapping.ask("gone")

    async def waiting() -> int:
        return (await swapping.stats()).num_requests_waiting

    async def both_wait() -> bool:
        return await waiting() == 2

    await until(both_wait)
    await swapping.engine.abort("gone")
    assert (await gone).outputs[0].finish_reason == "abort"
    assert told == []
    turnstile.open()
    found = (await swap)[0]
    assert found["seconds"].keys() == {"build", "drain", "switch"}
    assert {k: found[k] for k in found if k != "seconds"} == {
        **FACTS, "weights_version": "new", "previous_version": "0",
    }  # fmt: skip
    assert told == ["adopt_beside"]
    assert (await running).weights_versions == (await early).weights_versions == ("0",)
    assert len((await running).outputs[0].token_ids) == 300
    assert (await late).weights_versions == ("new",)
    assert await waiting() == 0


async def test_a_reader_that_is_behind_keeps_nobody_waiting(swapping: Swapping) -> None:
    """Its request is computed to the end, read or not."""
    swapping.turnstile.open()
    params = SamplingParams(
        max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA, logprobs=20
    )
    stream = swapping.engine.generate("slow", params, "slow")
    merged = await anext(stream)

    async def suspended() -> bool:
        return (await swapping.stats()).num_requests_suspended == 1

    await until(suspended)
    swap = swapping.swap()
    await swapping.read()
    assert (await swap)[0]["weights_version"] == "1"
    async for output in stream:
        merged.add(output, aggregate=True)
    assert merged.outputs[0].token_ids == expected_tokens("slow", params)
    assert merged.weights_versions == ("0",)


@pytest.mark.parametrize("error", [RequestError("path: no"), ZeroDivisionError("a bug")])
async def test_weights_that_cannot_be_read(swapping: Swapping, error: Exception) -> None:
    told = swapping.executor.worker.calls
    swap = swapping.swap()
    await swapping.read(error)
    kind = RequestError if isinstance(error, RequestError) else EngineError
    with pytest.raises(kind, match=r"path: no|ZeroDivisionError: a bug"):
        await swap
    swapping.turnstile.open()
    assert (await swapping.ask("on")).weights_versions == ("0",)
    assert told == ["drop_beside"]


async def test_a_model_that_does_not_take_its_place(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise MemoryError("no room for recordings")

    worker = swapping.executor.worker
    monkeypatch.setattr(worker, "adopt_beside", refuse)
    swap = swapping.swap(weights_version="new")
    await swapping.read()
    with pytest.raises(EngineError, match="the weights before serve on: MemoryError: no room"):
        await swap
    swapping.turnstile.open()
    assert (await swapping.ask("on")).weights_versions == ("0",)
    assert worker.calls == ["drop_beside"]
    assert await swapping.engine.collective_rpc("weights_version") == ["0"]


async def test_requests_that_do_not_end_in_time(swapping: Swapping) -> None:
    running = swapping.ask("runs", 30)
    await swapping.turnstile.go_on_until_running(swapping.engine, 1)
    swap = swapping.swap(drain_timeout=0)
    await swapping.read()
    await swapping.turnstile.go_on_until(swap.done)
    assert not running.done()
    with pytest.raises(RequestError, match="drain_timeout = 0: requests still run"):
        await swap
    late = swapping.ask("late")
    swapping.turnstile.open()
    assert len((await running).outputs[0].token_ids) == 30
    assert (await late).weights_versions == ("0",)
    assert swapping.executor.worker.calls == ["drop_beside"]


async def test_what_may_not_come_between(swapping: Swapping) -> None:
    swap = swapping.swap()
    await swapping.begun()
    for call, args in (
        ("swap_weights", [{"path": "/other"}]), ("reload_weights", []), ("sleep", [1]), ("wake_up", [None]),
        ("set_weights_version", ["x"]),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=f"{call}: must wait until weights are swapped"):
            await swapping.engine.collective_rpc(call, args=args)
    await swapping.read()
    await swap
    again = swapping.swap()
    await swapping.begun(2)
    await swapping.read()
    assert (await again)[0]["weights_version"] == "2"


async def test_a_sleeping_engine_is_not_swapped() -> None:
    core = make_core(sleep_mode=True)
    core.call_workers("sleep", [1])
    with pytest.raises(EngineAsleep, match="wake_up"):
        core.swap_weights({"path": "/new"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "args: None: must be one mapping with the keys path, weights_version"),
        ({"path": "/a", "folder": 1}, "must be one mapping with the keys path"),
        ({}, "path = None: must name the folder or file"),
        ({"path": "a\0b"}, "path = "),
        ({"path": "/a", "weights_version": ""}, "weights_version = ''"),
        ({"path": "/a", "drain_timeout": -1}, "drain_timeout = -1: must be a number of seconds"),
        ({"path": "/a", "drain_timeout": float("nan")}, "drain_timeout = nan"),
        ({"path": "/a", "drain_timeout": True}, "drain_timeout = True"),
        ({"path": "/a", "probe": []}, r"probe = \[\]: must be a list of 1 to 256 probes"),
        ({"path": "/a", "probe": [{"prompt": "x"}]}, r"probe\[0\] = .* the keys prompt_token_ids and"),
        (
            {"path": "/a", "probe": [{"prompt_token_ids": []}]},
            r"probe\[0\].prompt_token_ids: must hold at least",
        ),
        (
            {"path": "/a", "probe": [{"prompt_token_ids": [1, -1]}]},
            "must be a list of token ids",
        ),
        ({"path": "/a", "probe": [{"prompt_token_ids": [1] * (1 << 20)}] * 2}, "tokens: must be at most"),
        ({"path": "/a", "max_perplexity": 3}, "max_perplexity: must be left out without a probe"),
        (
            {"path": "/a", "max_perplexity": 0.5, "probe": [{"prompt_token_ids": [1, 2]}]},
            "max_perplexity = 0.5: must be a number from 1 on",
        ),
    ],
)  # fmt: skip
def test_what_is_no_order(options: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SwapOrder.of(options)


def test_workers_without_a_method_beside_steps() -> None:
    executor = UniProcExecutor(lambda: make_core().executor.worker)  # type: ignore[attr-defined]
    executor.start()
    try:
        assert executor.call_beside("report").result(PATIENCE) == [{"rank": 0}]
        with pytest.raises(UnsupportedFeature, match="build_beside: a FakeWorker cannot do this"):
            executor.call_beside("build_beside")
    finally:
        executor.shutdown()
