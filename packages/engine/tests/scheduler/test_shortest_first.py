"""Order of waiting prompts by what is left of them, with a bound on waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest
from headrace_engine.scheduler.shortest_first import (
    MOST_MEASURED,
    MOST_MEASURED_TOKENS,
    ShortestFirstQueue,
)

Make = Callable[..., Any]


class Line:
    """A queue with a target of 10 s, a clock that is held, and a made-up prefix cache."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cached: dict[SchedulerRequest, int] = {}
        self.measured: list[int] = []
        self.queue = ShortestFirstQueue(10.0, self.measure, lambda: self.now)
        self.states: list[SchedulerRequest] = []

    def measure(self, state: SchedulerRequest) -> int:
        self.measured.append(state.sequence_number)
        return state.num_tokens - self.cached.get(state, 0)

    def arrive(self, length: int) -> SchedulerRequest:
        number = len(self.states)
        request = CoreRequest(
            f"r{number}", [1] * length, SamplingParams(), frozenset(), 4, self.now, 0, owner=""
        )
        state = SchedulerRequest.create(
            request, number, by_priority=False, now=self.now, max_model_len=1 << 20
        )
        self.states.append(state)
        self.queue.push(state)
        return state

    def drain(self) -> list[int]:
        return [self.queue.pop().sequence_number for _ in range(len(self.queue))]


def end(queue: ShortestFirstQueue, state: SchedulerRequest) -> None:
    state.status = RequestStatus.FINISHED
    queue.discard()


def test_the_shortest_goes_first_and_equals_by_arrival() -> None:
    line = Line()
    for length in (50, 20, 90, 20, 5):
        line.arrive(length)
    line.queue.refresh()
    assert line.queue.peek() is line.states[4]
    assert line.drain() == [4, 1, 3, 0, 2]
    with pytest.raises(IndexError):
        line.queue.peek()


def test_who_has_waited_longer_than_the_target_goes_before_all_that_have_not() -> None:
    line = Line()
    for length in (90, 40, 60):
        line.arrive(length)
    line.now = 5.0
    line.arrive(1)
    line.now = 10.0
    line.queue.refresh()
    assert line.queue.peek() is line.states[3], "just within the target"
    line.now = 10.5
    assert line.queue.peek() is line.states[3], "the head changes between steps only"
    line.queue.refresh()
    assert line.drain() == [0, 1, 2, 3]


def test_what_the_prefix_cache_holds_does_not_count() -> None:
    line = Line()
    long, short = line.arrive(100), line.arrive(30)
    line.cached[long] = 96
    line.queue.refresh()
    assert line.queue.peek() is long
    line.cached.clear()  # evicted
    line.queue.refresh()
    assert line.queue.peek() is short
    assert line.drain() == [1, 0]


def test_few_are_looked_up_for_a_step_and_all_of_them_in_turn() -> None:
    line = Line()
    for _ in range(100):
        line.arrive(8)
    seen = []
    for _ in range(8):
        line.measured.clear()
        line.queue.refresh()
        assert len(line.measured) == MOST_MEASURED
        seen += line.measured
    assert set(seen) == set(range(100))
    newest = line.arrive(8)
    line.measured.clear()
    line.queue.refresh()
    assert newest.sequence_number in line.measured, "new ones at once"


def test_long_prompts_are_looked_up_one_by_one() -> None:
    line = Line()
    for _ in range(4):
        line.arrive(MOST_MEASURED_TOKENS)
    line.queue.refresh()
    assert len(line.measured) == 1


def test_preempted_requests_go_first() -> None:
    line = Line()
    waiting, first, second = line.arrive(1), line.arrive(900), line.arrive(800)
    for state in (first, second):
        line.queue.take(state)
        state.status = RequestStatus.PREEMPTED
    line.queue.push_back_first(second)
    line.queue.push_back_first(first)
    line.queue.refresh()
    assert len(line.queue) == 3
    assert line.queue.pop() is first
    line.queue.put_back([first])
    assert line.drain() == [1, 2, 0]
    assert waiting.num_to_compute == 1


def test_what_was_popped_goes_back_to_its_place() -> None:
    line = Line()
    for length in (50, 20, 90):
        line.arrive(length)
    popped = [line.queue.pop() for _ in range(2)]
    for state in reversed(popped):
        line.queue.push_back_first(state)
    assert line.drain() == [1, 0, 2]
    line.queue.put_back(line.states)
    assert line.drain() == [1, 0, 2]


def test_heaps_do_not_grow_by_what_goes_back() -> None:
    line = Line()
    for length in (50, 20, 90):
        line.arrive(length)
    for turn in range(2000):
        line.cached[line.states[2]] = turn % 7
        line.queue.refresh()
        line.queue.push_back_first(line.queue.pop())
    assert len(line.queue) == 3
    assert len(line.queue._by_length) + len(line.queue._by_arrival) < 200


def test_who_is_not_there_cannot_be_taken() -> None:
    line = Line()
    state = line.arrive(5)
    line.queue.take(state)
    with pytest.raises(IndexError, match="r0"):
        line.queue.take(state)
    assert len(line.queue) == 0


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(1, 40)),
            st.tuples(
                st.sampled_from(["pop", "pop", "end", "take", "back", "wait"]), st.integers(0, 9)
            ),
        ),
        max_size=80,
    )
)
def test_any_order_of_calls(moves: list[tuple[str, int]]) -> None:
    """Against a list that is searched each time."""
    line = Line()
    waiting: list[SchedulerRequest] = []
    popped: list[SchedulerRequest] = []

    def key(state: SchedulerRequest) -> tuple[int, int, int]:
        number = state.sequence_number
        if line.queue._now - state.queued_ts > 10.0:
            return 0, 0, number
        return 1, state.num_tokens, number

    for name, drawn in moves:
        if name == "arrive":
            waiting.append(line.arrive(drawn))
        elif name == "wait":
            line.now += drawn
            line.queue.refresh()
        elif name == "back" and popped:
            state = popped.pop()
            line.queue.push_back_first(state)
            waiting.append(state)
        elif name == "pop" and waiting:
            state = min(waiting, key=key)
            assert line.queue.peek() is state
            assert line.queue.pop() is state
            waiting.remove(state)
            popped.append(state)
        elif name in ("end", "take") and waiting:
            state = waiting.pop(drawn % len(waiting))
            if name == "end":
                end(line.queue, state)
            else:
                line.queue.take(state)
        assert len(line.queue) == len(waiting)
    assert line.drain() == [state.sequence_number for state in sorted(waiting, key=key)]


def test_ended_requests_do_not_pile_up() -> None:
    line = Line()
    line.arrive(1)
    for _ in range(2000):
        end(line.queue, line.arrive(30))
    assert len(line.queue) == 1
    assert line.queue._num_stored() < 200
    assert line.drain() == [0]


# -- in the scheduler --------------------------------------------------------------------------


def test_a_short_prompt_overtakes_long_ones(make_world: Make) -> None:
    world = make_world(3000, budget=10, max_model_len=500, target_ttft=60.0)
    expected = {name: world.add(name, 100, max_tokens=3) for name in "ab"}
    assert world.step() == {"a": 10}
    expected["s"] = world.add("s", 4, max_tokens=3)
    assert world.step() == {"s": 4, "a": 6}, "also the one that has begun"
    assert world.step() == {"s": 1, "a": 9}
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected
    assert world.scheduler.stats().num_preemptions == 0


def test_by_arrival_a_short_prompt_waits(make_world: Make) -> None:
    world = make_world(3000, budget=10, max_model_len=500)
    world.add("a", 100, max_tokens=3)
    assert world.step() == {"a": 10}
    world.add("s", 4, max_tokens=3)
    assert world.step() == {"a": 10}


def test_a_prompt_that_was_overtaken_goes_on_where_it_was(make_world: Make) -> None:
    world = make_world(3000, budget=10, max_model_len=500, target_ttft=60.0, max_num_seqs=10)
    world.add("a", 100, max_tokens=1)
    world.step()
    world.add("m", 35, max_tokens=1)
    assert [world.step() for _ in range(3)] == [{"m": 10}] * 3
    world.add("s", 12, max_tokens=1)
    assert world.step() == {"m": 5, "s": 5}, "less is left of it now"
    assert world.step() == {"s": 7, "a": 3}
    steps = world.run()
    assert sum(step["a"] for step in steps) == 100 - 10 - 3
    assert world.worker.num_computed == 100 + 35 + 12


def test_who_waits_for_too_long_is_not_overtaken_any_more(make_world: Make) -> None:
    world = make_world(3000, budget=10, max_model_len=500, target_ttft=5.0)
    world.add("a", 40, max_tokens=1)
    world.add("b", 30, max_tokens=1)
    world.now = 4.0
    world.add("s", 20, max_tokens=1)
    assert world.step() == {"s": 10}
    world.now = 6.0
    world.add("t", 2, max_tokens=1)
    assert [world.step() for _ in range(4)] == [{"a": 10}] * 4
    assert [world.step() for _ in range(3)] == [{"b": 10}] * 3
    assert world.step() == {"t": 2, "s": 8}


def test_a_cached_prefix_makes_a_prompt_short(make_world: Make) -> None:
    world = make_world(3000, budget=10, max_model_len=500, target_ttft=60.0)
    shared = list(range(5000, 5100))
    world.add("f", shared, max_tokens=1)
    world.run()
    world.add("a", 30, max_tokens=1)
    world.add("c", [*shared, 1, 2, 3], max_tokens=1)
    assert world.step() == {"c": 3, "a": 7}


def test_preempted_prompts_come_to_their_ends(make_world: Make) -> None:
    """Blocks for hardly more than one: whoever has begun last gives way, and all get their tokens."""
    world = make_world(32, budget=10, max_model_len=62, target_ttft=60.0, caching=False)
    expected = {name: world.add(name, 50, max_tokens=6) for name in "abc"}
    world.step()
    for name in "xyz":
        expected[name] = world.add(name, 30, max_tokens=6)
        world.step()
    world.run()
    assert {name: world.tokens(name) for name in expected} == expected
    assert world.scheduler.stats().num_preemptions > 0
    assert world.kv.num_free_blocks == world.kv.num_blocks


def test_what_raises_while_it_is_looked_up_ends_that_request_only(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(3000, budget=10, max_model_len=500, target_ttft=60.0)
    match = world.kv.match_prefix

    def broken(sequence: Any) -> Any:
        if sequence.request_id == "bad":
            raise ValueError("no prefix")
        return match(sequence)

    monkeypatch.setattr(world.kv, "match_prefix", broken)
    world.add("bad", 4, max_tokens=1)
    expected = world.add("a", 8, max_tokens=2)
    assert world.step() == {"a": 8}
    (refused,) = world.scheduler.take_refused()
    assert (refused.request_id, refused.error) == ("bad", "ValueError: no prefix")
    world.run()
    assert world.tokens("a") == expected
