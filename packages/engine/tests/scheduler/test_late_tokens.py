"""Requests whose next token takes long to allow: out of steps meanwhile, with all that they hold."""

from __future__ import annotations

from typing import Any

import pytest
from late_worker import NEVER, LateWorker

from headrace_testing.engine.schedulers import batched

SLOW = "slow"


def delayed(world: Any, steps: int = NEVER, first: int = 0) -> LateWorker:
    """Have the tokens of the slow request come so many steps late, from this one on."""
    prompts: dict[str, int] = {}

    def delay(request_id: str, count: int) -> int:
        if request_id != SLOW:
            return 0
        prompts.setdefault(request_id, count)
        return steps if count - prompts[request_id] >= first else 0

    world.worker = LateWorker(world.worker, delay, lambda request_id: request_id == SLOW)
    return world.worker


@pytest.mark.parametrize("overlapped", [False, True])
def test_others_go_on_until_the_token_is_there(make_world: Any, overlapped: bool) -> None:
    world = make_world(overlapped=overlapped)
    expected = {SLOW: world.add(SLOW, 4, max_tokens=4), "b": world.add("b", 4, max_tokens=40)}
    worker = delayed(world, first=1)
    blocks = None
    for _ in range(12):
        world.schedule()
        world.land()
        if worker.late:
            blocks = blocks or world.kv.block_ids(SLOW)
            assert world.kv.block_ids(SLOW) == blocks, "it keeps what it holds"
    assert len(world.tokens("b")) == 12
    assert world.tokens(SLOW) == expected[SLOW][:1]
    assert world.scheduler.num_running == 2
    for _ in range(3):
        worker.release(SLOW)
        world.schedule()
        world.land()
        world.schedule()
        world.land()
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected
    assert world.scheduler.stats().num_preemptions == 0
    assert worker.overdue == []


def test_nothing_is_scheduled_behind_a_token_that_may_be_late(make_world: Any) -> None:
    """With two steps in flight the second would have to wait for the first one's token."""
    world = make_world(overlapped=True)
    world.add(SLOW, 4, max_tokens=9)
    world.add("b", 4, max_tokens=9)
    delayed(world, steps=0)
    world.schedule()
    assert list(world.schedule().num_scheduled_tokens) == [SLOW, "b"], "nobody knows yet"
    world.land()
    assert list(world.schedule().num_scheduled_tokens) == ["b"]
    world.land()
    assert list(world.schedule().num_scheduled_tokens) == [SLOW, "b"]


@pytest.mark.parametrize("overlapped", [False, True])
def test_alone_it_still_finishes(make_world: Any, overlapped: bool) -> None:
    """Steps without requests give the worker time; they count as none."""
    world = make_world(overlapped=overlapped)
    expected = world.add(SLOW, 4, max_tokens=5)
    delayed(world, steps=3)
    steps = world.run()
    assert world.tokens(SLOW) == expected
    assert world.finish_reason(SLOW) == "length"
    assert {} in steps
    assert world.scheduler.stats().num_steps == sum(map(bool, steps))


def test_no_empty_step_while_one_is_in_flight(make_world: Any) -> None:
    world = make_world(overlapped=True)
    world.add(SLOW, 4, max_tokens=5)
    delayed(world)
    world.schedule()
    world.land()
    assert world.schedule().num_scheduled_tokens == {}
    assert world.scheduler.schedule() is None


def test_aborted_while_late(make_world: Any) -> None:
    world = make_world()
    expected = world.add("b", 4, max_tokens=6)
    world.add(SLOW, 4, max_tokens=5)
    worker = delayed(world)
    world.step()
    (output,) = world.scheduler.abort([SLOW])
    assert (output.finish_reason, output.new_token_ids) == ("abort", [])
    again = world.add(SLOW, 7, max_tokens=1)
    world.step()
    worker.release(SLOW)
    world.run()
    assert world.tokens("b") == expected
    assert world.tokens(SLOW) == again
    assert world.kv.num_free_blocks == world.kv.num_blocks


def test_a_token_of_an_aborted_one_is_not_its_namesakes(make_world: Any) -> None:
    world = make_world(overlapped=True)
    world.add("b", 4, max_tokens=9)
    world.add(SLOW, 4, max_tokens=5)
    worker = delayed(world)
    world.schedule()
    world.land()
    world.schedule()
    worker.release(SLOW)
    world.scheduler.abort([SLOW])
    expected = world.add(SLOW, 7, max_tokens=3)
    worker.delay = lambda request_id, count: 0
    world.land()
    assert world.tokens(SLOW) == []
    world.run()
    assert world.tokens(SLOW) == expected


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("how", ["preempt", "suspend", "reset"])
def test_it_samples_the_same_token_again(make_world: Any, overlapped: bool, how: str) -> None:
    """Who loses its blocks loses its logits; the worker may have the token on the way already."""
    world = make_world(overlapped=overlapped)
    expected = {SLOW: world.add(SLOW, 4, max_tokens=4), "b": world.add("b", 4, max_tokens=9)}
    worker = delayed(world)
    world.step()
    world.schedule()
    worker.release(SLOW)
    if how == "preempt":
        world.scheduler.preempt_all()
    elif how == "suspend":
        world.scheduler.suspend([SLOW])
        world.scheduler.resume([SLOW])
    else:
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.land()
    assert world.tokens(SLOW) == []
    worker.delay = lambda request_id, count: 0
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected


def test_preempted_before_it_is_known_to_be_late(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add(SLOW, 4, max_tokens=4)
    worker = delayed(world)
    world.schedule()
    world.scheduler.preempt_all()
    world.land()
    assert world.scheduler.num_running == 0
    worker.delay = lambda request_id, count: 0
    world.run()
    assert world.tokens(SLOW) == expected


def test_others_that_need_its_blocks_preempt_it(make_world: Any) -> None:
    world = make_world(6)
    expected = {"b": world.add("b", 4, max_tokens=8), SLOW: world.add(SLOW, 4, max_tokens=4)}
    worker = delayed(world)
    while len(world.tokens("b")) < 8:
        world.step()
    assert world.scheduler.stats().num_preemptions == 1
    worker.delay = lambda request_id, count: 0
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected


def test_a_step_fails_while_it_is_late(make_world: Any) -> None:
    """Others are computed alone; it had no part in that step and goes on behind them. The step of a
    quarantined request waits for its token."""
    world = make_world()
    expected = {SLOW: world.add(SLOW, 4, max_tokens=4), "b": world.add("b", 4, max_tokens=5)}
    worker = delayed(world)
    world.step()
    step = world.schedule()
    worker.skip(world.in_flight.popleft())
    assert world.scheduler.fail(step, "broken")[0].request_id == "b"
    worker.delay = lambda request_id, count: 2
    world.run()
    assert world.tokens(SLOW) == expected[SLOW]


def test_suspects_are_not_late(make_world: Any) -> None:
    world = make_world()
    expected = {name: world.add(name, 4, max_tokens=4) for name in (SLOW, "b")}
    step = world.schedule()
    worker = delayed(world, steps=2)
    worker.skip(world.in_flight.popleft())
    assert world.scheduler.fail(step, "broken") == []
    assert not world.schedule().allows_late
    world.land()
    assert world.tokens(SLOW) == expected[SLOW][:1]
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected


def test_a_late_result_may_be_an_error(make_world: Any) -> None:
    world = make_world()
    expected = world.add("b", 4, max_tokens=6)
    world.add(SLOW, 4, max_tokens=5)
    worker = delayed(world)
    world.step()
    worker.late[SLOW].token_ids = []
    worker.late[SLOW].dead_end = "matching takes too long"
    worker.release(SLOW)
    world.run()
    assert world.finish_reason(SLOW) == "error"
    assert world.outputs[SLOW][-1].dead_end == "matching takes too long"
    assert world.tokens("b") == expected
    assert world.kv.num_free_blocks == world.kv.num_blocks


@pytest.mark.parametrize("how", ["preempt", "suspend"])
def test_what_a_step_in_flight_brings_stays_in_order(make_world: Any, how: str) -> None:
    """Its second token was scheduled before the first one was known to be late: both come together."""
    world = make_world(overlapped=True)
    expected = {SLOW: world.add(SLOW, 4, max_tokens=6), "b": world.add("b", 4, max_tokens=9)}
    worker = delayed(world)
    world.schedule()
    world.schedule()
    world.land()
    worker.delay = lambda request_id, count: 0
    if how == "preempt":
        world.scheduler.preempt_all()
    else:
        world.scheduler.suspend([SLOW])
        world.scheduler.resume([SLOW])
    world.land()
    assert world.tokens(SLOW) == expected[SLOW][:2]
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected


def test_a_token_in_bulk_does_not_come_before_a_late_one(make_world: Any) -> None:
    """Tokens that are told in bulk are read first, so that of a request that gets both none is among them."""
    world = make_world(overlapped=True)
    expected = world.add(SLOW, 4, max_tokens=6)
    worker = delayed(world)
    world.schedule()
    step = world.schedule()
    world.land()
    worker.delay = lambda request_id, count: 0
    result, told = world.worker.execute(step), dict[str, int]()
    result.requests[SLOW].is_slow = result.late[SLOW].is_slow = False  # what follows is quick
    result = batched(result)
    assert list(result.tokens) == list(result.late) == [SLOW]
    outputs = world.scheduler.update(step, result, told)
    assert told == {}
    assert [output.new_token_ids for output in outputs] == [[token] for token in expected[:2]]
