"""The user's side of logits processors: state by slot, and adapters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.sampling.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from headrace_core.sampling.params import SamplingParams

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


def params(name: str | None) -> SamplingParams:
    return SamplingParams(extra_args=None if name is None else {"name": name})


def add(slot: int, name: str | None) -> tuple[int, SamplingParams, None, list[int]]:
    return (slot, params(name), None, [])


def state_of(p: SamplingParams, prompt: list[int] | None, output: list[int]) -> str | None:
    return None if p.extra_args is None else p.extra_args["name"]


@pytest.mark.parametrize(
    ("before", "update", "after", "changed"),
    [
        ({0: "a"}, None, {0: "a"}, False),
        ({0: "a", 2: "c"}, BatchUpdate(2, removed=[2]), {0: "a"}, True),
        ({0: "a"}, BatchUpdate(2, removed=[1]), {0: "a"}, False),
        # Adding to an occupied slot drops who was there, whether or not the new one has a state.
        ({0: "a"}, BatchUpdate(1, added=[add(0, "b")]), {0: "b"}, True),
        ({0: "a"}, BatchUpdate(1, added=[add(0, None)]), {}, True),
        ({0: "a"}, BatchUpdate(2, added=[add(1, None)]), {0: "a"}, False),
        # A one-way move empties its source and discards whom it meets; a swap does neither.
        ({0: "a", 3: "d"}, BatchUpdate(1, moved=[(3, 0, ONE_WAY)]), {0: "d"}, True),
        ({0: "a"}, BatchUpdate(1, moved=[(3, 0, ONE_WAY)]), {}, True),
        ({0: "a", 3: "d"}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {0: "d", 3: "a"}, True),
        ({0: "a"}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {3: "a"}, True),
        ({}, BatchUpdate(4, moved=[(3, 0, SWAP)]), {}, False),
        # The spec's worked cases: one new, two gone, one swap; two new, one gone, one swap.
        ({0: "a", 1: "b", 2: "c", 3: "d"},
         BatchUpdate(3, removed=[3], added=[add(1, "e")], moved=[(0, 2, SWAP)]),
         {0: "c", 1: "e", 2: "a"}, True),
        ({0: "a", 1: "b"},
         BatchUpdate(3, added=[add(0, "c"), add(2, "d")], moved=[(0, 2, SWAP)]),
         {0: "d", 1: "b", 2: "c"}, True),
        # The slot of an added request is that before any move.
        ({1: "b"}, BatchUpdate(2, removed=[0], added=[add(2, "c")], moved=[(2, 0, ONE_WAY)]),
         {0: "c", 1: "b"}, True),
    ],
)  # fmt: skip
def test_states_follow_the_batch(before: Any, update: Any, after: Any, changed: bool) -> None:
    states = dict(before)
    assert process_dict_updates(states, update, state_of) is changed
    assert states == after


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.booleans()),
            st.tuples(st.just("remove"), st.integers(0, 5)),
            st.tuples(st.just("move"), st.integers(0, 5), st.integers(0, 5), st.booleans()),
        ),
        max_size=40,
    )
)
def test_states_equal_a_list_of_slots(steps: list[Any]) -> None:
    """A dense list of slots, with None for empty ones, is the oracle."""
    dense: list[str | None] = [None] * 6
    states: dict[int, str] = {}
    for number, (kind, first, *rest) in enumerate(steps):
        if kind == "add":
            name = f"r{number}" if rest[0] else None
            dense[first] = name
            update = BatchUpdate(6, added=[add(first, name)])
        elif kind == "remove":
            dense[first] = None
            update = BatchUpdate(6, removed=[first])
        else:
            second, swaps = rest
            if first == second:
                continue
            if swaps:
                dense[first], dense[second] = dense[second], dense[first]
            else:
                dense[second], dense[first] = dense[first], None
            update = BatchUpdate(6, moved=[(first, second, SWAP if swaps else ONE_WAY)])
        process_dict_updates(states, update, state_of)
        assert states == {slot: name for slot, name in enumerate(dense) if name is not None}


class Processor(LogitsProcessor):
    """A class; nobody makes an object of it."""


def test_one_processor_needs_no_list_and_others_are_refused() -> None:
    assert ModelConfig(logits_processors="a.b:C").logits_processors == ("a.b:C",)  # type: ignore[arg-type]
    assert ModelConfig(logits_processors=Processor).logits_processors == (Processor,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="logits_processors = 3"):
        ModelConfig(logits_processors=(3,))
