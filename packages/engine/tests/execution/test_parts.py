"""How steps are divided among lanes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.execution.pooling import LEAST_TOKENS, divide, longest_first

COUNTS = st.lists(st.integers(1, 300), min_size=1, max_size=60).map(
    lambda counts: sorted(counts, reverse=True)
)


def sizes(counts: list[int], cuts: list[int]) -> list[int]:
    return [sum(counts[a:b]) for a, b in pairwise(cuts)]


def test_longest_first_keeps_the_order_of_equals() -> None:
    assert list(longest_first({"a": 2, "b": 9, "c": 2, "d": 5})) == ["b", "d", "a", "c"]


@given(counts=COUNTS, lanes=st.integers(1, 9), most=st.integers(1, 2000))
def test_parts_are_the_step_and_fit(counts: list[int], lanes: int, most: int) -> None:
    cuts = divide(counts, lanes, most)
    assert (cuts[0], cuts[-1]) == (0, len(counts))
    assert all(a < b for a, b in pairwise(cuts))
    found = sizes(counts, cuts)
    if len(found) > 1:
        assert max(found) <= most
        assert len(found) >= lanes, "all lanes have something to do"
        assert max(found) <= sum(counts) // lanes, "and none does all the work"


@given(counts=st.lists(st.integers(30, 99), min_size=20, max_size=60))
def test_parts_shrink(counts: list[int]) -> None:
    counts.sort(reverse=True)
    found = sizes(counts, divide(counts, 2, 4096))
    left = sum(counts)
    for size in found[:-1]:
        assert size <= max(LEAST_TOKENS, left // 4)
        left -= size
    assert found[-1] <= LEAST_TOKENS


@pytest.mark.parametrize(
    ("counts", "lanes", "most"),
    [
        ([128] * 16, 1, 4096),  # nobody else
        ([100] * 5, 2, 4096),  # not worth it
        ([1500, *[20] * 20], 2, 4096),  # one thread would be at work when the other has ended
        ([600] * 4, 2, 500),  # does not fit a lane
        ([1024, 1024], 64, 4096),  # more threads than prompts
    ],
)
def test_steps_that_threads_share_call_by_call(counts: list[int], lanes: int, most: int) -> None:
    assert divide(counts, lanes, most) == [0, len(counts)]
