"""Coroutines of an engine's front in a thread without an event loop: what they wait for runs side by side."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_core.errors import GenerateError, RequestError
from headrace_core.sampling.params import SamplingParams
from headrace_engine.calls import RequestUpdate
from headrace_engine.stepping import CoroutineStepper, ThreadWaiting, result_at_once
from headrace_engine.transcription.calls import ClipRequests


class FakeCalls:
    """Calls, of which one is opened: each wait ends all requests that were added."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.added: list[str] = []
        self.batches: list[list[str]] = []
        self.closed = False

    def open(self) -> FakeCalls:
        return self

    def add(self, request: Any) -> None:
        if request.request_id == "refused":
            raise RequestError("prompt: refused")
        self.added.append(request.request_id)

    def wait(self) -> list[RequestUpdate]:
        added, self.added = self.added, []
        self.batches.append(added)
        output: Any = (lambda name: None) if self.error else (lambda name: f"<{name}>")
        return [RequestUpdate(name, output(name), True, self.error) for name in added]

    def close(self) -> None:
        self.closed = True


WAITING = ThreadWaiting()


async def work(*names: str) -> str:
    """Requests one after the other."""
    done = [await WAITING.begin(_request(name)) for name in names]
    return "".join(done)


def _request(name: str, pooling: Any = None) -> Any:
    return SimpleNamespace(request_id=name, pooling=pooling)


def stepping(calls: Any) -> CoroutineStepper:
    return CoroutineStepper(calls)


def test_requests_of_all_run_together() -> None:
    calls, found = FakeCalls(), list[str]()
    with stepping(calls) as stepper:
        stepper.start(work("a", "b"), found.append)
        stepper.start(work("c"), found.append)
        assert stepper.num_running == 2
        stepper.finish()
    assert found == ["<c>", "<a><b>"]
    assert calls.batches == [["a", "c"], ["b"]]
    assert calls.closed


def test_a_result_is_waited_for_while_others_go_on() -> None:
    calls, found = FakeCalls(), list[str]()
    with stepping(calls) as stepper:
        stepper.start(work("a"), found.append)
        assert stepper.result(work("b")) == "<b>"
        assert stepper.num_running == 0
    assert found == ["<a>"]
    assert calls.batches == [["a", "b"]]


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_a_group_runs_so_many_at_once(at_once: int) -> None:
    calls, found = FakeCalls(), dict[int, str]()
    names = ["a", "b", "c", "d", "e"]

    async def all_of_them() -> str:
        members = (work(*([name] if name != "b" else [])) for name in names)
        await WAITING.together(members, at_once, found.__setitem__)
        return "done"

    with stepping(calls) as stepper:
        assert stepper.result(all_of_them()) == "done"
    assert found == {0: "<a>", 1: "", 2: "<c>", 3: "<d>", 4: "<e>"}
    assert max(map(len, calls.batches)) == min(at_once, 4)


def test_an_empty_group_ends_at_once() -> None:
    async def nothing() -> int:
        await WAITING.together(iter(()), 3, print)
        return 4

    with stepping(FakeCalls()) as stepper:
        assert stepper.result(nothing()) == 4


def test_coroutines_that_are_left_are_closed() -> None:
    left: list[Coroutine[Any, Any, Any]] = [work("a"), work("b")]
    refused = work("refused")
    parent = WAITING.together(iter([work("c")]), 1, print)
    with stepping(FakeCalls()) as stepper:
        for one in [*left, parent]:
            stepper.start(one, print)
        with pytest.raises(RequestError, match="refused"):
            stepper.start(refused, print)
    for one in [*left, parent, refused]:
        assert inspect.getcoroutinestate(one) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("error", "reason"), [(None, "was aborted"), (GenerateError("as told"), "as told")]
)
def test_a_request_without_an_output_is_an_error(error: Any, reason: str) -> None:
    calls = FakeCalls(error)
    calls.wait = lambda: [RequestUpdate("a", None, True, error)]  # type: ignore[method-assign]
    told: list[str] = []
    waiting = ThreadWaiting(told.append)

    async def pool() -> None:
        await waiting.begin(_request("a", SimpleNamespace(task="embed")))

    with stepping(calls) as stepper, pytest.raises(GenerateError, match=reason):
        stepper.result(pool())
    assert told == ["abort" if error is None else "error"]


def test_a_coroutine_that_waits_for_nothing_is_run_at_once() -> None:
    assert result_at_once(WAITING.compute(lambda: 3)) == 3
    with pytest.raises(RuntimeError, match="waits for requests"):
        result_at_once(work("a"))


def test_a_coroutine_that_does_not_end_well_keeps_no_other_from_ending() -> None:
    ended: list[str] = []

    async def stubborn() -> None:
        try:
            await WAITING.begin(_request("a"))
        finally:
            ended.append("stubborn")
            raise ValueError("as told")

    async def good() -> None:
        try:
            await WAITING.begin(_request("b"))
        finally:
            ended.append("good")

    calls = FakeCalls()
    stepper = stepping(calls)
    for one in (good(), stubborn(), work("c")):
        stepper.start(one, print)
    with pytest.raises(ValueError, match="as told"):
        stepper.__exit__()
    assert sorted(ended) == ["good", "stubborn"]
    assert calls.closed


def test_requests_of_clips_that_are_under_way_end_with_the_stepper() -> None:
    async def complete(prompt: Any, params: Any, request_id: str) -> Any:
        return await WAITING.begin(_request(request_id))

    async def compute(made: Any) -> Any:
        return made()

    engine: Any = None
    clips = ClipRequests(engine, complete, "r", compute)
    left = [clips.generate("x", SamplingParams()) for _ in range(3)]
    with stepping(FakeCalls()) as stepper:
        for one in left:
            stepper.start(one, print)
    assert {inspect.getcoroutinestate(one) for one in left} == {inspect.CORO_CLOSED}
