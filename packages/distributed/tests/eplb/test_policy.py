"""The default policy: published arrangements, and what holds of any."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_core import plugins
from headrace_distributed.eplb.policy import DefaultPolicy, ExpertPlaces

FIRST = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
SECOND = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]


def placed(loads: list[int], replicas: int, groups: int, nodes: int, ranks: int) -> ExpertPlaces:
    return DefaultPolicy.rebalance_experts(torch.tensor([loads]), replicas, groups, nodes, ranks)


@pytest.mark.parametrize(
    ("loads", "sizes", "expected"),
    [
        (FIRST, (16, 4, 2, 8), [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
        (SECOND, (16, 4, 2, 8), [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
        (FIRST, (16, 1, 1, 8), [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1]),
        (SECOND, (16, 1, 1, 8), [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7]),
        ([10, 1, 1, 1], (6, 1, 1, 3), [0, 1, 0, 2, 0, 3]),
    ],
)
def test_known_arrangements(
    loads: list[int], sizes: tuple[int, int, int, int], expected: list[int]
) -> None:
    """Those of the algorithm's publication, and others that were computed apart from this code."""
    assert placed(loads, *sizes).physical_to_logical.tolist() == [expected]


def test_groups_that_nodes_do_not_divide_are_one() -> None:
    odd, whole = placed(FIRST, 16, 3, 2, 8), placed(FIRST, 16, 1, 1, 8)
    assert torch.equal(odd.physical_to_logical, whole.physical_to_logical)


def test_mixtures_are_placed_one_by_one() -> None:
    both = DefaultPolicy.rebalance_experts(torch.tensor([FIRST, SECOND]), 16, 4, 2, 8)
    for index, loads in enumerate((FIRST, SECOND)):
        alone = placed(loads, 16, 4, 2, 8)
        assert torch.equal(both.physical_to_logical[index], alone.physical_to_logical[0])


def test_numbers_of_the_256_experts_of_deepseek() -> None:
    found = placed(list(range(256)), 288, 8, 1, 32)
    assert found.physical_to_logical.shape == (1, 288)
    assert found.logical_to_physical.shape == (1, 256, 33)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    nodes = draw(st.integers(1, 3))
    ranks = nodes * draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4)) * ranks
    replicas = experts + ranks * draw(st.integers(0, 3))
    size = st.integers(0, 1000)
    loads = draw(st.lists(size, min_size=experts, max_size=experts))
    return loads, replicas, groups, nodes, ranks


@given(cases())
def test_every_expert_is_there_and_the_maps_agree(
    case: tuple[list[int], int, int, int, int],
) -> None:
    loads, replicas, _, _, _ = case
    found = placed(*case)
    physical, counts = found.physical_to_logical[0].tolist(), found.counts[0].tolist()
    assert sorted(set(physical)) == list(range(len(loads)))
    assert sum(counts) == replicas == len(physical)
    assert found.logical_to_physical.shape == (1, len(loads), replicas - len(loads) + 1)
    for expert, places in enumerate(found.logical_to_physical[0].tolist()):
        there = [place for place in places if place >= 0]
        assert there == places[: counts[expert]]
        assert sorted(there) == [at for at, one in enumerate(physical) if one == expert]


@given(st.lists(st.integers(1, 1000), min_size=12, max_size=12), st.integers(0, 2))
def test_copies_go_to_the_busiest(loads: list[int], more: int) -> None:
    """With n copies of an expert no other one has more tokens for a copy than it had with n - 1."""
    counts = placed(loads, 12 + 4 * more, 1, 1, 4).counts[0].tolist()
    for load, count in zip(loads, counts, strict=True):
        if count > 1:
            assert (
                load / (count - 1) >= max(w / c for w, c in zip(loads, counts, strict=True)) - 1e-3
            )


def test_the_busiest_rank_gets_less_to_do() -> None:
    generator = torch.Generator().manual_seed(0)
    better = 0
    for _ in range(100):
        loads = (torch.rand(32, generator=generator) ** 3 * 1000).long().tolist()
        places = placed(loads, 32, 1, 1, 4).physical_to_logical[0].view(4, 8)
        after = torch.tensor(loads)[places].sum(1).max()
        better += int(after <= torch.tensor(loads).view(4, 8).sum(1).max())
    assert better >= 90


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((13, 1, 1, 4), "num_ranks = 4 does not divide num_replicas = 13"),
        ((12, 1, 1, 5), "num_ranks = 5"),
        ((16, 5, 1, 4), "num_groups = 5 does not divide experts = 12"),
        ((18, 6, 2, 3), "num_nodes = 2 does not divide num_ranks = 3"),
        ((8, 1, 1, 4), "num_replicas = 8: must be at least 12"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(
    sizes: tuple[int, int, int, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        placed(FIRST, *sizes)


def test_the_policy_is_found_by_its_name() -> None:
    assert plugins.load("headrace.eplb_policies", "default") is DefaultPolicy
