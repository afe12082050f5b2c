"""Where steps end within prompts with media, and how much of media one encodes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.errors import RequestError


def test_a_step_ends_before_what_must_not_be_cut(make_world: Any) -> None:
    world = make_world(budget=8)
    expected = world.add("a", 20, max_tokens=2, items=[(5, 6)], whole_spans=[(5, 11)])
    assert world.run() == [{"a": 5}, {"a": 8}, {"a": 7}, {"a": 1}]
    assert world.tokens("a") == expected


def test_parts_with_text_between_are_not_cut_there(make_world: Any) -> None:
    world = make_world(budget=8)
    expected = world.add("a", 20, max_tokens=2, items=[(5, 2), (9, 2)], whole_spans=[(5, 7, 9, 11)])
    assert world.run() == [{"a": 5}, {"a": 8}, {"a": 7}, {"a": 1}]
    assert world.tokens("a") == expected
    with pytest.raises(RequestError, match="tokens 2 to 11 of the prompt must be computed in one"):
        world.add("b", 20, items=[(2, 1), (10, 2)], whole_spans=[(2, 3, 10, 12)])


def test_parts_that_follow_each_other(make_world: Any) -> None:
    world = make_world(budget=8)
    world.add("a", 16, max_tokens=1, items=[(0, 3), (3, 4), (7, 8)],
              whole_spans=[(0, 3), (3, 7), (7, 15)])  # fmt: skip
    assert world.run() == [{"a": 7}, {"a": 8}, {"a": 1}]


def test_one_may_take_more_than_steps_have_for_several_requests(make_world: Any) -> None:
    world = make_world(budget=20, max_num_seqs=2, max_num_shared_tokens=6)
    world.add("a", 12, max_tokens=3, items=[(1, 11)], whole_spans=[(1, 12)])
    world.add("b", 7, max_tokens=1)
    steps = world.run()
    assert {"a": 1} in steps or steps[0]["a"] == 1
    assert any(step.get("a") == 11 for step in steps)


def test_it_waits_for_a_step_that_has_room(make_world: Any) -> None:
    world = make_world(budget=8)
    world.add("a", 2, max_tokens=3)
    world.add("b", 8, max_tokens=1, items=[(0, 8)], whole_spans=[(0, 8)])
    world.add("c", 2, max_tokens=1)
    assert world.step() == {"a": 2}  # nobody overtakes b
    assert world.run() == [{"a": 1}, {"a": 1}, {"b": 8}, {"c": 2}]


def test_what_fits_into_no_step_is_refused(make_world: Any) -> None:
    world = make_world(budget=8)
    with pytest.raises(
        RequestError, match=r"tokens 2 to 10 of the prompt must be computed in one step.*at most 8"
    ):
        world.add("a", 20, items=[(2, 9)], whole_spans=[(2, 11)])
    world.add("b", 20, items=[(2, 9)])
    world = make_world(budget=8, disable_chunked_mm_input=True)
    with pytest.raises(RequestError, match="--max-num-batched-tokens"):
        world.add("b", 20, items=[(2, 9)])


def test_items_are_cut_unless_that_is_disabled(make_world: Any) -> None:
    world = make_world(budget=8)
    world.add("a", 20, max_tokens=1, items=[(5, 6)])
    assert world.run() == [{"a": 8}, {"a": 8}, {"a": 4}]
    world = make_world(budget=8, disable_chunked_mm_input=True)
    world.add("a", 20, max_tokens=1, items=[(5, 6)])
    assert world.run() == [{"a": 5}, {"a": 8}, {"a": 7}]


def test_a_step_encodes_no_more_than_it_may(make_world: Any) -> None:
    world = make_world(budget=20, max_num_encoder_input_tokens=5)
    world.add("a", 18, max_tokens=1, items=[(1, 3), (4, 3), (8, 2), (10, 6)])
    world.add("b", 4, max_tokens=1)
    # Three vectors, and three more would be too many; six are, but one item may always be encoded.
    assert world.run() == [{"a": 4, "b": 4}, {"a": 6}, {"a": 8}]


def test_requests_share_what_a_step_encodes(make_world: Any) -> None:
    world = make_world(budget=20, max_num_encoder_input_tokens=5)
    world.add("a", 5, max_tokens=2, items=[(0, 4)])
    world.add("b", 5, max_tokens=1, items=[(2, 3)])
    assert world.run() == [{"a": 5, "b": 2}, {"a": 1, "b": 3}]


@pytest.mark.parametrize("overlapped", [False, True])
@given(st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_part_is_ever_cut(make_world: Any, overlapped: bool, data: st.DataObject) -> None:
    budget = data.draw(st.integers(4, 12))
    world = make_world(
        data.draw(st.integers(24, 60)), budget=budget, max_num_seqs=3, overlapped=overlapped,
        max_num_encoder_input_tokens=data.draw(st.none() | st.integers(1, 8)),
        max_num_partial_prefills=data.draw(st.integers(1, 2)),
        max_num_shared_tokens=data.draw(st.none() | st.integers(3, budget)),
    )  # fmt: skip
    expected, borders = {}, {}
    for name in "abcd"[: data.draw(st.integers(1, 4))]:
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
        ends = list(itertools.accumulate(sizes))
        spans = [(end - size, end) for size, end in zip(sizes, ends) if data.draw(st.booleans())]
        items = [(first, end - first) for first, end in spans]
        expected[name] = world.add(name, ends[-1], max_tokens=3, items=items, whole_spans=spans)
        borders[name] = spans
    while world.scheduler.has_unfinished:
        step = world.scheduler.schedule()
        if step is None:
            world.land()
            continue
        world.in_flight.append(step)
        assert sum(step.num_scheduled_tokens.values()) <= budget
        for name in step.num_scheduled_tokens:
            state = world.scheduler._tracker.requests[name]
            end = state.num_computed_tokens
            assert not any(first < end < last for first, last in borders[name]), (name, end)
        if not overlapped:
            world.land()
    assert {name: world.tokens(name) for name in expected} == expected
