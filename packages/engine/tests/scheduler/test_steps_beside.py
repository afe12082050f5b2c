"""Steps that run beside each other, in stages: no request is in two of them whose next token is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace_engine.scheduler.request import RequestStatus

Make = Callable[..., Any]


def fill(world: Any) -> list[dict[str, int]]:
    """Schedule until nothing can run."""
    steps = []
    while (step := world.scheduler.schedule()) is not None:
        world.in_flight.append(step)
        steps.append(step.num_scheduled_tokens)
    return steps


@pytest.mark.parametrize("stages", [2, 3])
def test_requests_are_divided_and_come_to_their_ends(make_world: Make, stages: int) -> None:
    world = make_world(overlapped=True, steps_beside=stages)
    expected = {name: world.add(name, 3, max_tokens=4) for name in "abcde"}
    share = -(-5 // stages)
    assert [len(step) for step in fill(world)] == [min(share, 5 - i) for i in range(0, 5, share)]
    while world.in_flight:
        under_way = [name for step in world.in_flight for name in step.num_scheduled_tokens]
        assert len(under_way) == len(set(under_way))
        world.land()
        fill(world)
    assert {name: world.tokens(name) for name in "abcde"} == expected


def test_parts_of_a_prompt_follow_each_other(make_world: Make) -> None:
    world = make_world(budget=4, overlapped=True, steps_beside=3)
    expected = world.add("a", 10, max_tokens=3)
    assert fill(world) == [{"a": 4}, {"a": 4}, {"a": 2}]
    for _ in range(3):
        world.land()
    assert fill(world) == [{"a": 1}]
    assert world.scheduler.schedule() is None, "its token is not known"
    while world.in_flight:
        world.land()
        fill(world)
    assert world.tokens("a") == expected


def test_a_request_that_is_preempted_under_way_goes_on(make_world: Make) -> None:
    """Its token comes, and it is computed again; others take its blocks."""
    world = make_world(9, overlapped=True, steps_beside=2, caching=False)
    expected = {name: world.add(name, 4, max_tokens=8) for name in "ab"}
    preempted = False
    fill(world)
    while world.in_flight:
        world.land()
        fill(world)
        states = world.scheduler._tracker.requests.values()
        preempted |= any(state.status is RequestStatus.PREEMPTED for state in states)
    assert preempted
    assert {name: world.tokens(name) for name in "ab"} == expected


def test_one_step_at_a_time_without_overlap(make_world: Make) -> None:
    world = make_world(overlapped=False, steps_beside=2)
    for name in "ab":
        world.add(name, 3)
    assert fill(world) == [{"a": 3, "b": 3}]
