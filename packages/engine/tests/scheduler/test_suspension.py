"""Requests whose readers are behind: out of steps and queue, without blocks, until they are resumed."""

from __future__ import annotations

from typing import Any

import pytest


def drain(world: Any) -> None:
    """Steps until nothing can run."""
    for _ in range(200):
        if world.scheduler.is_idle:
            return
        world.step()
    raise AssertionError("something runs for ever")


@pytest.mark.req("REL-06")
@pytest.mark.parametrize("caching", [True, False])
def test_a_suspended_request_holds_nothing_and_goes_on_with_the_same_tokens(
    make_world: Any, caching: bool
) -> None:
    world = make_world(caching=caching)
    expected = world.add("a", 5, max_tokens=12)
    world.step()
    world.step()
    world.scheduler.suspend(["a"])
    assert world.scheduler.is_idle
    assert world.scheduler.has_unfinished
    assert world.scheduler.schedule() is None
    stats = world.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_requests_suspended == 1
    assert world.kv.num_free_blocks == world.kv.num_blocks
    world.scheduler.resume(["a"])
    assert not world.scheduler.is_idle
    assert world.scheduler.stats().num_requests_suspended == 0
    world.run()
    assert world.tokens("a") == expected
    assert world.scheduler.stats().num_preemptions == 0, (
        "it was its reader's, not the cache's, doing"
    )


@pytest.mark.req("REL-06")
def test_others_take_its_place(make_world: Any) -> None:
    """Its blocks and its seat: nobody waits for a reader."""
    world = make_world(num_blocks=8, max_num_seqs=1)
    slow = world.add("a", 6, max_tokens=8)
    world.step()
    quick = world.add("b", 8, max_tokens=6)
    world.scheduler.suspend(["a"])
    drain(world)
    assert (world.tokens("b"), world.finish_reason("b")) == (quick, "length")
    world.scheduler.resume(["a"])
    world.run()
    assert world.tokens("a") == slow


def test_it_goes_before_those_that_never_ran(make_world: Any) -> None:
    world = make_world(max_num_seqs=1)
    world.add("a", 2, max_tokens=8)
    world.step()
    world.scheduler.suspend(["a"])
    world.add("b", 2)
    world.add("c", 2)
    world.scheduler.resume(["a"])
    assert list(world.step()) == ["a"]


def test_what_is_in_flight_still_comes(make_world: Any) -> None:
    world = make_world(overlapped=True)
    expected = world.add("a", 4, max_tokens=3)
    world.schedule()
    world.schedule()
    world.scheduler.suspend(["a"])
    world.land()
    assert world.tokens("a") == expected[:1]
    world.scheduler.resume(["a"])
    assert world.scheduler.schedule() is None, "it needs its token in flight first"
    world.land()
    assert world.tokens("a") == expected[:2]
    world.run()
    assert world.tokens("a") == expected


def test_it_may_end_with_the_token_in_flight(make_world: Any) -> None:
    world = make_world()
    expected = world.add("a", 4, max_tokens=1)
    world.add("b", 4, max_tokens=6)
    world.schedule()
    world.scheduler.suspend(["a"])
    world.land()
    assert (world.tokens("a"), world.finish_reason("a")) == (expected, "length")
    world.scheduler.resume(["a"])
    world.run()
    assert world.scheduler.is_idle
    assert not world.scheduler.has_unfinished


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_preempted_one_leaves_the_queue(make_world: Any, policy: str) -> None:
    world = make_world(policy=policy)
    expected = world.add("a", 4, max_tokens=6)
    others = world.add("b", 4, max_tokens=6)
    world.step()
    world.scheduler.preempt_all()
    assert world.scheduler.num_waiting == 2
    world.scheduler.suspend(["a"])
    assert world.scheduler.num_waiting == 1
    drain(world)
    assert world.tokens("b") == others
    assert world.tokens("a") == expected[:1]
    world.scheduler.resume(["a"])
    world.run()
    assert world.tokens("a") == expected


def test_aborted_while_suspended(make_world: Any) -> None:
    world = make_world()
    world.add("a", 4)
    world.add("b", 4)
    world.step()
    world.scheduler.suspend(["a", "b"])
    [output] = world.scheduler.abort(["a"])
    assert output.finish_reason == "abort"
    world.scheduler.resume(["a", "b", "nobody"])
    world.scheduler.suspend(["a", "nobody"])
    world.run()
    assert world.scheduler.is_idle
    assert world.kv.num_free_blocks == world.kv.num_blocks
    assert world.scheduler.num_waiting == 0


def test_twice_is_once(make_world: Any) -> None:
    world = make_world()
    expected = world.add("a", 4, max_tokens=6)
    world.step()
    for _ in range(2):
        world.scheduler.suspend(["a"])
    for _ in range(2):
        world.scheduler.resume(["a"])
    world.run()
    assert world.tokens("a") == expected


def test_a_suspect_that_is_suspended_waits(make_world: Any) -> None:
    """After a step failed its requests are computed one by one; not one whose reader is behind."""
    world = make_world()
    expected = {name: world.add(name, 4, max_tokens=5) for name in "ab"}
    world.step()
    step = world.schedule()
    world.worker.skip(world.in_flight.popleft())
    world.keep(world.scheduler.fail(step, "broken"))
    world.scheduler.suspend(["a"])
    drain(world)
    assert world.tokens("b") == expected["b"]
    world.scheduler.resume(["a"])
    world.run()
    assert world.tokens("a") == expected["a"]


def test_a_suspect_that_was_suspended_takes_somebodys_seat(make_world: Any) -> None:
    """Others came while it was suspended, as many as there may be."""
    world = make_world(max_num_seqs=2)
    expected = {name: world.add(name, 4, max_tokens=9) for name in "ab"}
    world.step()
    step = world.schedule()
    world.worker.skip(world.in_flight.popleft())
    world.keep(world.scheduler.fail(step, "broken"))
    world.scheduler.suspend(["a"])
    expected |= {name: world.add(name, 4, max_tokens=9) for name in "cd"}
    for _ in range(20):
        world.step()
        if world.scheduler.num_running == 2:
            break
    world.scheduler.resume(["a"])
    world.step()
    assert world.scheduler.num_running <= 2
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected
