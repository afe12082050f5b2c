"""Cores of engines that share experts sleep and wake together, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
from engine_fakes import PATIENCE, FakeExecutor, make_core
from test_sleep import KEPT, request

from headrace_core.errors import EngineAsleep, EngineError, RequestError, WeightsError
from headrace_engine.core import EngineCore
from headrace_engine.lockstep.joint_calls import obey_jointly
from headrace_engine.lockstep.turns import LockstepTurns

GONE = "model.safetensors: gone"


class Table:
    """Where two engines say their words, and hear each other's."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._words = ["", ""]

    def agree(self, engine: int, word: str) -> Sequence[str]:
        self._words[engine] = word
        self._barrier.wait(PATIENCE)
        words = list(self._words)
        self._barrier.wait(PATIENCE)
        return words


class Turns:
    """One engine's place at the table."""

    def __init__(self, table: Table, engine: int) -> None:
        self.obey = partial(obey_jointly, partial(table.agree, engine))


class Pair:
    """Two cores, and what their workers were told."""

    def __init__(self) -> None:
        table = Table()
        self.cores = [make_core(sleep_mode=True) for _ in range(2)]
        for engine, core in enumerate(self.cores):
            core.lockstep = cast(LockstepTurns, Turns(table, engine))
            self.worker(engine).calls.clear()

    def worker(self, engine: int) -> Any:
        executor = self.cores[engine].executor
        assert isinstance(executor, FakeExecutor)
        return executor.worker

    @property
    def told(self) -> list[list[str]]:
        return [self.worker(engine).calls for engine in range(2)]

    def call(self, method: str, *args: Any, other: tuple[Any, ...] | None = None) -> list[Any]:
        """Results of both, or what they raised.

        Args:
            other: what engine 1 is told in its place.
        """
        calls = [(method, *args), (method, *args) if other is None else other]
        with ThreadPoolExecutor(2) as pool:
            futures: list[Future[Any]] = [
                pool.submit(core.call_workers, name, rest)
                for core, (name, *rest) in zip(self.cores, calls, strict=True)
            ]
            return [future.exception(PATIENCE) or future.result() for future in futures]

    def fails_once(self, engine: int, method: str, error: BaseException) -> None:
        worker = self.worker(engine)

        def fail(*args: Any) -> None:
            delattr(worker, method)
            raise error

        setattr(worker, method, fail)

    @property
    def take_requests(self) -> list[bool]:
        return [_takes(core) for core in self.cores]


def _takes(core: EngineCore) -> bool:
    try:
        core._sleep.check_awake()
    except EngineAsleep:
        return False
    return True


def test_all_sleep_and_wake() -> None:
    pair = Pair()
    assert pair.call("sleep", 1) == [[], []]
    assert pair.told == [[KEPT]] * 2
    assert pair.call("wake_up", ["weights"]) == [[], []]
    assert pair.take_requests == [False, False]
    assert pair.call("wake_up", None) == [[], []]
    assert pair.told == [[KEPT, "read_weights", "restore_cache"]] * 2
    assert pair.take_requests == [True, True]


def test_none_sleeps_while_one_has_requests() -> None:
    pair = Pair()
    pair.cores[1].add(request("a"))
    first, second = pair.call("sleep", 1)
    assert str(second).startswith("method = 'sleep': must wait until no request runs")
    assert isinstance(first, RequestError)
    assert first.param == "method"
    assert str(first) == f"engine 1: {second}"
    assert pair.told == [[], []]
    assert pair.take_requests == [True, True]


def test_engines_that_are_told_different_things_do_neither() -> None:
    pair = Pair()
    found = pair.call("sleep", 1, other=("sleep", 2))
    assert [type(error) for error in found] == [RequestError] * 2
    assert "sleep 1: engine 1 was told something else at the same time (sleep 2)" in str(found[0])
    assert "engine 0 was told something else at the same time (sleep 1)" in str(found[1])
    assert pair.told == [[], []]


@pytest.mark.parametrize("method", ["read_weights", "restore_cache"])
@pytest.mark.parametrize("engine", [0, 1])
def test_where_one_cannot_wake_all_sleep_on(engine: int, method: str) -> None:
    """One that woke a part sleeps again, so that no part is awake in one engine and asleep in another."""
    pair = Pair()
    pair.call("sleep", 1)
    pair.fails_once(engine, method, WeightsError(GONE))
    found = pair.call("wake_up", None)
    assert str(found[engine]) == GONE
    assert str(found[1 - engine]) == f"engine {engine}: {GONE}"
    assert [type(error) for error in found] == [WeightsError] * 2
    assert [calls[-1] for calls in pair.told] == ["give_back_memory"] * 2
    with pytest.raises(EngineAsleep, match=r"sleeps \(weights, kv_cache\)"):
        pair.cores[0].add(request("a"))
    assert pair.call("wake_up", None) == [[], []]
    assert pair.take_requests == [True, True]


def test_where_one_cannot_read_weights_none_has_some() -> None:
    pair = Pair()
    pair.fails_once(1, "reload_weights", WeightsError(GONE))
    first, second = pair.call("reload_weights")
    assert (str(first), str(second)) == (f"engine 1: {GONE}", GONE)
    assert pair.told == [["reload_weights", "give_back_memory"], ["give_back_memory"]]
    for core in pair.cores:
        with pytest.raises(EngineAsleep, match="reload_weights comes first"):
            core.add(request("a"))
    pair.call("reload_weights")
    assert [calls[-2:] for calls in pair.told] == [["read_weights, changed", "restore_cache"]] * 2
    assert pair.take_requests == [True, True]


@pytest.mark.parametrize("level", [1, 2])
def test_where_one_cannot_sleep_all_are_awake(level: int) -> None:
    pair = Pair()
    pair.fails_once(1, "give_back_memory", OSError("no"))
    first, second = pair.call("sleep", level)
    assert isinstance(second, OSError)
    assert isinstance(first, EngineError)
    assert str(first) == "engine 1: OSError: no"
    assert pair.told[0][1:] == ["read_weights", "restore_cache"]
    assert pair.take_requests == [True, True]


def test_an_engine_that_ended_meanwhile_says_nothing() -> None:
    """The others are ended by who started them."""
    told: list[str] = []

    def agree(word: str) -> Sequence[str]:
        told.append(word)
        raise EngineError("rank 1 has died")

    def must_not_run(*_: Any) -> Any:
        raise AssertionError

    run = cast(Callable[..., Any], must_not_run)
    with pytest.raises(EngineError, match="rank 1"):
        obey_jointly(agree, "sleep 1", check=lambda: None, obey=run, take_back=run)
    assert len(told) == 1
