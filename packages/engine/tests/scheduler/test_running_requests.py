"""Running requests keep the policy's order, and steps of the same requests share one mapping."""

from __future__ import annotations

import random

import pytest

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.scheduler.request import SchedulerRequest
from headrace_engine.scheduler.request_tracker import RunningRequests


def request(number: int, priority: int = 0) -> SchedulerRequest:
    core = CoreRequest(
        request_id=f"r{number}",
        prompt_token_ids=[1],
        params=SamplingParams(),
        stop_token_ids=frozenset(),
        max_tokens=4,
        arrival_time=0.0,
        priority=priority,
    )
    return SchedulerRequest.create(core, number, by_priority=True, now=0.0, max_model_len=9)


def ids(states: object) -> list[str]:
    return [state.request_id for state in states]  # type: ignore[attr-defined]


def test_the_order_is_the_policys() -> None:
    """Beside a list that is sorted each time."""
    running, draw = RunningRequests(), random.Random(0)
    model: list[SchedulerRequest] = []
    away: list[SchedulerRequest] = []
    steps: list[tuple[dict[str, int], list[tuple[str, int]]]] = []
    for number in range(600):
        turn = draw.random()
        if turn < 0.5 or not model:
            state = request(number, draw.choice([0, 0, 0, 1, -1]))
            if away and draw.random() < 0.3:
                state = away.pop()
            running.add(state)
            model.append(state)
            model.sort(key=lambda one: one.sort_key)
        elif turn < 0.6:
            away.append(model.pop())
            assert running.pop() is away[-1]
        elif turn < 0.75:
            gone = draw.choice(model)
            running.remove(gone)
            model.remove(gone)
            with pytest.raises(ValueError, match="does not run"):
                running.remove(gone)
        elif turn < 0.85:
            ended = draw.sample(model, min(3, len(model)))
            running.drop([*ended, request(-number - 1)])
            model = [one for one in model if one not in ended]
        else:
            counts = {one.request_id: draw.choice([1, 1, 1, 3, 0]) for one in model}
            counts = {name: count for name, count in counts.items() if count}
            step, _ = running.counts(counts, may_share=draw.random() < 0.5)
            steps.append((step, list(step.items())))
            assert steps[-1][1] == [
                (one.request_id, counts[one.request_id])
                for one in model
                if one.request_id in counts
            ]
        if model and draw.random() < 0.3:
            assert ids(running) == ids(model)
            assert ids(reversed(running)) == ids(reversed(model))
            place = draw.randrange(len(model))
            assert ids(running.behind(model[place])) == ids(model[place + 1 :])
        assert len(running) == len(model)
        assert all(one in running for one in model)
        assert set(running.outside) == set(model)
    assert all(list(step.items()) == before for step, before in steps), "steps are not changed"


def test_steps_of_the_same_requests_share_one_mapping() -> None:
    running = RunningRequests()
    states = [request(number) for number in range(3)]
    for state in states:
        running.add(state)
    ones = dict.fromkeys(["r0", "r1", "r2"], 1)
    first, is_shared = running.counts(ones, may_share=True)
    assert (first, is_shared) == (ones, True)
    assert running.counts(ones, may_share=True)[0] is first
    own, is_shared = running.counts(ones, may_share=False)
    assert (own, is_shared) == (ones, False)
    assert own is not first
    running.remove(states[1])
    assert first == ones
    third, _ = running.counts({"r0": 1, "r2": 1}, may_share=True)
    assert list(third) == ["r0", "r2"]


def test_nobody_can_be_taken_from_nobody() -> None:
    with pytest.raises(KeyError):
        RunningRequests().pop()
