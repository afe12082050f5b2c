"""Prompt tokens of steps that hold decoding requests: bounded by a target, learned from their times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headrace_engine.scheduler.batch_plan import BatchPlan
from headrace_engine.scheduler.prompt_pace import (
    LEAST_PROMPT_TOKENS,
    STEPS_BEFORE_WARNING,
    PromptPace,
)

Make = Callable[..., Any]


class Times:
    """A pace, with a clock that is held."""

    def __init__(self, target: float, **settings: Any) -> None:
        self.now = 100.0
        self.pace = PromptPace(target, lambda: self.now, **settings)

    def schedule(self, num_decoding: int, num_prompt: int, **of_plan: int) -> None:
        plan: Any = BatchPlan(1000, max_requests=8)
        plan.budget -= num_decoding + num_prompt
        plan.num_prompt_tokens = num_prompt
        plan.entries = [object()] * (num_decoding + num_prompt > 0)
        for name, value in of_plan.items():
            setattr(plan, name, value)
        self.pace.scheduled(plan)

    def end(self, after: float, **how: bool) -> None:
        self.now += after
        self.pace.ended(**how)

    def run(self, num_decoding: int, num_prompt: int, seconds: float, **of_plan: int) -> None:
        self.schedule(num_decoding, num_prompt, **of_plan)
        self.end(seconds)


def test_until_a_prompt_was_seen_there_is_room_for_a_block() -> None:
    times = Times(0.1)
    assert times.pace.most_prompt_tokens(4) == LEAST_PROMPT_TOKENS
    times.run(4, 0, 0.05)
    assert times.pace.most_prompt_tokens(4) == LEAST_PROMPT_TOKENS
    times.run(0, 100, 0.1)
    assert times.pace.most_prompt_tokens(4) > LEAST_PROMPT_TOKENS


def test_room_is_what_fits_into_the_target() -> None:
    times = Times(0.15)
    times.run(4, 0, 0.05)
    times.run(4, 100, 0.15)
    assert times.pace.most_prompt_tokens(4) == pytest.approx(100, abs=1)


def test_prompts_never_starve() -> None:
    times = Times(0.01)
    times.run(4, 0, 0.05)
    times.run(4, 100, 0.15)
    assert times.pace.most_prompt_tokens(4) == LEAST_PROMPT_TOKENS


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    times = Times(0.15)
    times.schedule(4, 0)
    times.now += 0.02
    times.schedule(4, 100)  # while the other runs
    times.end(0.03)
    times.end(0.1)
    assert times.pace.most_prompt_tokens(4) == pytest.approx(200, abs=2), "0.05 s, and 0.1 s"


def test_a_pause_before_a_step_is_not_its_own() -> None:
    times = Times(0.15)
    times.run(4, 0, 0.05)
    times.now += 60.0
    times.run(4, 100, 0.15)
    assert times.pace.most_prompt_tokens(4) == pytest.approx(100, abs=1)


def test_in_stages_a_step_begins_when_one_of_those_beside_it_has_ended() -> None:
    times = Times(0.3, steps_beside=2)
    times.schedule(4, 0)
    times.now += 0.05
    times.schedule(4, 0)
    times.end(0.05)  # the first: 0.1 s
    times.schedule(4, 100)
    times.end(0.05)  # the second: 0.1 s
    times.end(0.15)  # the third, which began when the first had ended: 0.2 s
    assert times.pace.most_prompt_tokens(4) == pytest.approx(200, abs=2)


@pytest.mark.parametrize(
    "end", [{"num_media_vectors": 9}, {"num_encoder_tokens": 9}, {"failed": True}], ids=str
)
def test_steps_that_encode_or_fail_teach_nothing(end: dict[str, Any]) -> None:
    times = Times(0.15)
    times.run(4, 0, 0.05)
    times.run(4, 100, 0.15)
    before = times.pace.most_prompt_tokens(4)
    failed = end.pop("failed", False)
    times.schedule(4, 100, **end)
    times.end(3.0, failed=failed)
    assert times.pace.most_prompt_tokens(4) == before
    times.run(4, 100, 0.15)
    assert times.pace.most_prompt_tokens(4) == pytest.approx(100, abs=1)


def test_a_target_that_cannot_be_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    times = Times(0.01)
    times.run(4, 100, 0.15)
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * STEPS_BEFORE_WARNING):
            times.run(4, 0, 0.05)
            times.pace.most_prompt_tokens(4)
    (record,) = caplog.records
    assert "target_itl = 0.01: a step of 4 tokens takes 0.05 s" in record.getMessage()


# -- in the scheduler --------------------------------------------------------------------------


def paced(make_world: Make, **settings: Any) -> Any:
    """Blocks of 2, steps of up to 200 tokens; one request decodes, and times are known."""
    settings = {"target_itl": 0.1, "budget": 200, "max_model_len": 1000, **settings}
    world = make_world(3000, **settings)
    world.add("d", 20, max_tokens=600)
    timed(world)
    for _ in range(3):
        timed(world)
    world.add("w", 60, max_tokens=1)
    for _ in range(12):
        timed(world)
    assert world.finish_reason("w") == "length"
    return world


def timed(world: Any) -> dict[str, int]:
    """One step, of 20 ms, 1 ms for each token of a prompt and 5 ms for each that decodes."""
    step = world.schedule()
    counts = step.num_scheduled_tokens
    world.now += 0.02 + sum(0.005 if count == 1 else 0.001 * count for count in counts.values())
    world.land()
    return dict(counts)


def test_prompts_beside_a_stream_take_what_fits_into_the_target(make_world: Make) -> None:
    world = paced(make_world)
    world.add("p", 600, max_tokens=1)
    parts = []
    while world.finish_reason("d") is None and "p" not in world.outputs:
        parts.append(timed(world).get("p", 0))
    assert sum(parts) == 600
    assert all(part <= 80 for part in parts)
    assert sorted(parts)[len(parts) // 2] == pytest.approx(75, abs=8)


def test_prompts_alone_fill_steps(make_world: Make) -> None:
    world = make_world(3000, budget=200, max_model_len=1000, target_itl=0.001)
    world.add("p", 500, max_tokens=2)
    world.add("q", 300, max_tokens=2)
    assert [timed(world) for _ in range(3)] == [{"p": 200}, {"p": 200}, {"p": 100, "q": 100}]
    assert timed(world) == {"p": 1, "q": LEAST_PROMPT_TOKENS}


def test_who_decodes_comes_before_prompts_whatever_the_order(make_world: Make) -> None:
    world = make_world(3000, budget=8, max_model_len=1000, target_itl=10.0, policy="priority")
    world.add("d", 2, max_tokens=50, priority=5)
    timed(world)
    world.add("p", 40, max_tokens=2, priority=1)
    world.add("q", 40, max_tokens=2, priority=0)
    for _ in range(5):
        step = timed(world)
        assert step.pop("d") == 1
        assert step == {"q": 7}, "the more urgent one, with all that is left"


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_target_that_is_too_low_delays_prompts_and_changes_no_output(
    make_world: Make, policy: str, overlapped: bool
) -> None:
    world = make_world(
        3000, budget=64, max_model_len=500, target_itl=1e-9, policy=policy, overlapped=overlapped
    )
    expected = {name: world.add(name, 90, max_tokens=30) for name in "abcdef"}
    while world.scheduler.has_unfinished:
        while (step := world.scheduler.schedule()) is not None:
            world.in_flight.append(step)
        world.now += 0.05
        world.land()
    assert {name: world.tokens(name) for name in expected} == expected


def test_prompts_that_run_beside_a_token_on_its_way_are_bounded_too(make_world: Make) -> None:
    """In stages no step has both: the stream's token is in another one, and waits behind this one."""
    world = make_world(
        3000, budget=200, max_model_len=1000, target_itl=0.1, overlapped=True, steps_beside=2
    )
    world.add("d", 20, max_tokens=50)
    world.schedule()
    world.now += 0.04
    world.land()
    assert world.schedule().num_scheduled_tokens == {"d": 1}
    world.add("p", 600, max_tokens=1)
    assert world.schedule().num_scheduled_tokens == {"p": 40}, "twice what was seen"
