"""Weights that are filled with the number of their expert are where an arrangement says, after any move."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_core.parallel import Communicator, SingleProcess
from headrace_distributed.eplb.moves import Sending, are_alike, move_experts, sendings
from headrace_testing.model.decoders import run_ranks

Arrangement = list[list[int]]


def weights_of(slots: list[int]) -> list[list[Tensor]]:
    """Three tensors of an expert, of several dtypes and shapes."""
    return [
        [
            torch.full((2, 3), expert, dtype=torch.float32),
            torch.full((5,), expert, dtype=torch.uint8),
            torch.full((3, 1), expert, dtype=torch.bfloat16),
        ]
        for expert in slots
    ]


def arrangement(source: random.Random, ranks: int, slots: int, experts: int) -> Arrangement:
    places = [*range(experts), *(source.randrange(experts) for _ in range(ranks * slots - experts))]
    source.shuffle(places)
    return [places[rank * slots : (rank + 1) * slots] for rank in range(ranks)]


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_slots_hold_what_the_new_arrangement_says(
    ranks: int, slots: int, source: random.Random
) -> None:
    experts = source.randint(1, ranks * slots)
    orders = [arrangement(source, ranks, slots, experts) for _ in range(3)]

    def work(group: Communicator) -> list[list[Tensor]]:
        held = weights_of(orders[0][group.rank])
        for old, new in pairwise(orders):
            move_experts(old, new, held, group)
        return held

    found = run_ranks(ranks, work)
    for rank, held in enumerate(found):
        for tensors, expert in zip(held, orders[-1][rank], strict=True):
            assert [set(tensor.flatten().tolist()) for tensor in tensors] == [{expert}] * 3


def test_only_what_a_rank_lacks_is_sent() -> None:
    assert sendings([[0, 1], [2, 0]], [[1, 0], [0, 2]]) == []
    assert sendings([[0, 1], [2, 3], [1, 4]], [[0, 2], [1, 3], [1, 4]]) == [
        Sending(1, 0, (1,)),
        Sending(2, 1, (0,)),
    ]
    with pytest.raises(ValueError, match="expert 5 is on no rank"):
        sendings([[0], [1]], [[0], [5]])


def test_what_does_not_change_stays_in_its_memory() -> None:
    [first, second] = held = weights_of([0, 1])
    address = first[0].data_ptr()
    move_experts([[0, 1]], [[1, 1]], held, SingleProcess())
    assert first[0].data_ptr() == address
    assert float(first[0].max()) == 1 == float(second[0].max())


@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("slot", [0, 1])
def test_experts_of_other_sizes_are_seen_by_every_rank(rank: int | None, slot: int) -> None:
    def work(group: Communicator) -> bool:
        held = weights_of([0, 1])
        if group.rank == rank:
            held[slot][1] = torch.zeros(7, dtype=torch.uint8)
        return are_alike(held, group)

    assert run_ranks(2, work) == [rank is None] * 2
