"""Requests wait for their media's vectors while others decode, and for nothing else."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from headrace_core.step import StepResult


@pytest.fixture
def world(make_world: Any) -> Any:
    """In which a request decodes."""
    world = make_world(budget=20, encoder_share=0.4)
    world.add("a", 3, max_tokens=9)
    world.step()
    return world


def hash_of(request_id: str, offset: int) -> str:
    return sha256(f"{request_id} {offset}".encode()).hexdigest()


def asked(step: Any) -> list[str]:
    return [item.content_hash for item in step.media_ahead]


def test_nobody_waits_where_nobody_decodes(make_world: Any) -> None:
    world = make_world(budget=20, encoder_share=0.4)
    world.add("a", 8, items=[(1, 6)])
    step = world.schedule()
    assert step.num_scheduled_tokens == {"a": 8}
    assert step.media_ahead == []


def test_it_waits_while_another_decodes_and_goes_on_when_the_vectors_are_there(world: Any) -> None:
    expected = world.add("b", 8, max_tokens=2, items=[(1, 6)])
    step = world.schedule()
    assert step.num_scheduled_tokens == {"a": 1}
    assert asked(step) == [hash_of("b", 1)]
    world.land()
    step = world.schedule()
    assert step.num_scheduled_tokens == {"a": 1, "b": 8}
    assert asked(step) == []
    world.land()
    world.run()
    assert world.tokens("b") == expected


def test_text_behind_it_does_not_wait(world: Any) -> None:
    world.add("b", 8, items=[(1, 6)])
    world.add("c", 4)
    assert world.step() == {"a": 1, "c": 4}


def test_items_are_asked_for_once_and_shared(world: Any) -> None:
    world.add("b", 8, items=[(1, 3), (4, 3)])
    first, second = world.schedule(), None
    assert asked(first) == [hash_of("b", 1), hash_of("b", 4)]
    world.land()  # the first item's vectors are there
    second = world.schedule()
    assert (second.num_scheduled_tokens, asked(second)) == ({"a": 1}, [])
    world.land()
    assert world.step() == {"a": 1, "b": 8}


def test_what_goes_on_at_once_is_not_asked_for(make_world: Any) -> None:
    """The other's last token is on its way: nothing of it can be scheduled, and nobody gains by waiting."""
    world = make_world(budget=20, encoder_share=0.4, overlapped=True)
    world.add("a", 3, max_tokens=2)
    world.schedule()
    world.land()
    world.schedule()
    world.add("b", 8, items=[(1, 6)])
    step = world.schedule()
    assert (step.num_scheduled_tokens, asked(step)) == ({"b": 8}, [])
    world.land()
    world.land()


def test_it_goes_on_when_the_others_have_ended(world: Any) -> None:
    world.add("b", 8, items=[(1, 6)])
    step = world.schedule()
    assert asked(step)
    world.scheduler.abort(["a"])
    world.land()
    assert world.step() == {"b": 8}


def test_items_of_more_vectors_than_are_kept_come_one_by_one(make_world: Any) -> None:
    world = make_world(budget=5, encoder_share=0.4)
    world.add("a", 3, max_tokens=40)
    world.step()
    world.add("b", 8, items=[(0, 7)])
    world.add("c", 8, items=[(0, 7)])
    assert asked(world.schedule()) == [hash_of("b", 0)]
    world.land()
    step = world.schedule()
    assert step.num_scheduled_tokens == {"a": 1, "b": 4}
    world.land()
    while not (found := asked(world.schedule())):
        world.land()
    assert found == [hash_of("c", 0)]
    world.land()
    world.run()


def test_what_is_asked_for_fits_into_what_is_kept(world: Any) -> None:
    for name in "bcde":
        world.add(name, 10, items=[(1, 8)])
    assert asked(world.schedule()) == [hash_of("b", 1), hash_of("c", 1)]
    world.land()
    assert asked(world.schedule()) == [hash_of("d", 1)]  # b's are there
    world.land()
    world.run()


def test_what_a_client_that_left_had_asked_for_is_two_items_at_most(make_world: Any) -> None:
    world = make_world(budget=50, encoder_share=0.4)
    world.add("a", 3, max_tokens=9)
    world.step()
    for name in "bcdef":
        world.add(name, 6, items=[(1, 4)])
    assert asked(world.schedule()) == [hash_of("b", 1), hash_of("c", 1)]
    world.scheduler.abort(["b", "c", "d", "e"])
    world.land()  # b's are there, for nobody
    assert asked(world.schedule()) == [hash_of("f", 1)]
    world.land()
    world.run()
    assert world.finish_reason("f") == "length"


def test_a_running_request_stops_at_the_item_that_lacks_vectors(make_world: Any) -> None:
    world = make_world(budget=8, encoder_share=0.4)
    world.add("b", 20, max_tokens=1, items=[(10, 6)])
    assert world.step() == {"b": 8}
    world.add("a", 2, max_tokens=9)
    world.step()
    steps = world.run()
    assert {"a": 1} in steps
    assert world.finish_reason("b") == "length"


def test_after_a_failed_step_items_are_asked_for_again(world: Any) -> None:
    world.add("b", 8, items=[(1, 6)])
    step = world.schedule()
    assert asked(step)
    world.in_flight.clear()
    world.worker.skip(step)
    world.keep(world.scheduler.fail(step, "broken"))
    world.add("c", 3, max_tokens=9)
    found = []
    while world.scheduler.has_unfinished:
        step = world.schedule()
        found += asked(step)
        world.land()
    assert set(found) <= {hash_of("b", 1)}
    assert world.finish_reason("b") == "length"


def test_unknown_hashes_are_ignored(world: Any) -> None:
    step = world.scheduler.schedule()
    result = world.worker.execute(step)
    world.scheduler.update(step, StepResult(step.step_id, result.requests, embedded=["nobody's"]))


def test_without_a_share_nobody_waits(make_world: Any) -> None:
    world = make_world(budget=20, encoder_share=0.0)
    world.add("a", 3, max_tokens=9)
    world.step()
    world.add("b", 8, items=[(1, 6)])
    assert world.step() == {"a": 1, "b": 8}
