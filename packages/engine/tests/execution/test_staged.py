"""Steps of which a part is computed elsewhere: they begin before others are complete, and give what steps one
after the other give."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_capture import FakeGraph
from test_worker import config_for, make_worker

from headrace_core.errors import CaptureRefused
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.execution import ModelWorker
from headrace_engine.execution.capture import Capture
from headrace_engine.multiproc.staged import StagedRunner
from headrace_testing.fakes.requests import new_request

PROMPTS = {"a": [3, 4, 5], "b": [6, 7]}


def ready(model: Any, tiny: Any, **settings: Any) -> ModelWorker:
    worker = make_worker(model, **settings)
    worker.load()
    worker.allocate_cache(config_for(tiny))
    return worker


def first(step_id: int, name: str, block: int, count: int | None = None) -> ScheduledStep:
    prompt = PROMPTS[name]
    new = new_request(
        name, prompt, ([block, block + 1],), SamplingParams(temperature=0, max_tokens=9)
    )
    return ScheduledStep(step_id, {name: count or len(prompt)}, new_requests=[new])


def further(
    step_id: int, *names: str, count: int = 1, gone: list[str] | None = None
) -> ScheduledStep:
    return ScheduledStep(step_id, dict.fromkeys(names, count), gone_request_ids=gone or [])


@pytest.fixture
def launching(tiny: Any) -> Any:
    """A model whose passes come when the test lets them."""

    class Launching(tiny.LM):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.under_way: list[tuple[Future[Any], torch.Tensor]] = []

        ends_pass = False

        def launch(self, batch: Any) -> Future[Any]:
            self.under_way.append((Future(), self.forward(batch)))
            return self.under_way[-1][0]

        def run_part(self, batch: Any) -> torch.Tensor:
            assert batch.logits_rows is None, "all rows are handed on"
            self.part = self.forward(batch)
            return self.part

        def expect(self, num_rows: int) -> Future[Any]:
            self.under_way.append((Future(), self.part[-num_rows:]))
            return self.under_way[-1][0]

        def arrive(self) -> None:
            future, states = self.under_way.pop(0)
            future.set_result(lambda: states)

    return Launching()


def tokens(result: StepResult) -> dict[str, list[int]]:
    return {name: part.token_ids for name, part in result.requests.items()}


def test_two_steps_are_under_way(tiny: Any, launching: Any) -> None:
    plain, worker = ready(tiny.LM(), tiny), ready(launching, tiny)
    steps = [first(0, "a", 1), first(1, "b", 3), further(2, "a"), further(3, "b")]
    expected = [tokens(plain.execute(step)) for step in steps]
    steps = [first(0, "a", 1), first(1, "b", 3), further(2, "a"), further(3, "b")]
    results = [worker.execute(step) for step in steps[:2]]
    assert len(launching.under_way) == 2
    for number in range(4):
        result = results[number]
        assert result.arrival is not None
        assert not result.arrival.done()
        launching.arrive()
        result.finish()
        assert tokens(result) == expected[number]
        if number < 2:
            results.append(worker.execute(steps[2 + number]))


def test_a_step_that_fits_is_begun_by_its_recording(tiny: Any, launching: Any) -> None:
    """Its result is expected beside others'; a larger one is launched."""
    graph = FakeGraph()
    plain, worker = (
        ready(tiny.LM(), tiny),
        ready(launching, tiny, capture=Capture(lambda: lambda: graph, (2,))),
    )
    worker.warm_up()
    assert graph.need is not None
    assert graph.need.all_rows
    steps = [first(0, "a", 1), first(1, "b", 3), further(2, "a"), further(3, "b")]
    expected = [tokens(plain.execute(step)) for step in steps]
    steps = [first(0, "a", 1), first(1, "b", 3), further(2, "a"), further(3, "b")]
    found = []
    for pair in (steps[:2], steps[2:]):
        results = [worker.execute(step) for step in pair]
        assert len(launching.under_way) == 2
        for result in results:
            launching.arrive()
            result.finish()
            found.append(tokens(result))
    assert found == expected
    assert graph.replayed == [(2, None), (1, None), (1, None)]


def test_steps_whose_states_are_read_are_not_recorded() -> None:
    runner: Any = SimpleNamespace(tap=object())
    with pytest.raises(CaptureRefused, match="between layers of several stages"):
        StagedRunner.whole_step(runner, runner)


def test_parts_of_a_prompt_are_under_way(tiny: Any, launching: Any) -> None:
    plain, worker = ready(tiny.LM(), tiny), ready(launching, tiny)
    plain.execute(first(0, "a", 1, count=2))
    expected = tokens(plain.execute(further(1, "a")))
    results = [worker.execute(first(0, "a", 1, count=2)), worker.execute(further(1, "a"))]
    for result in results:
        launching.arrive()
        result.finish()
    assert tokens(results[0]) == {"a": []}
    assert tokens(results[1]) == expected


def test_a_step_that_takes_a_request_away_waits_for_it(tiny: Any, launching: Any) -> None:
    worker = ready(launching, tiny)
    one = worker.execute(first(0, "a", 1))
    launching.arrive()
    two = worker.execute(
        ScheduledStep(
            1, {"b": 2}, new_requests=first(1, "b", 3).new_requests, gone_request_ids=["a"]
        )
    )
    assert one.remaining is None, "it was completed before its request went"
    assert len(tokens(one)["a"]) == 1
    launching.arrive()
    two.finish()
    assert len(tokens(two)["b"]) == 1


def test_what_a_step_raises_it_raises_itself(tiny: Any, launching: Any) -> None:
    worker = ready(launching, tiny)
    one = worker.execute(first(0, "a", 1))
    future, _ = launching.under_way.pop()
    future.set_exception(ValueError("lost"))
    two = worker.execute(further(1, gone=["a"]))
    assert two.requests == {}
    with pytest.raises(ValueError, match="lost"):
        one.finish()
