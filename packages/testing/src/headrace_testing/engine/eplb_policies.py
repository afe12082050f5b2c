"""Conformance suite of policies that place experts (``headrace.eplb_policies``): a suite to inherit.

Letters: M mixtures, L experts of each, R places for them on all ranks, X most copies of one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

SIZES = ((4, 4, 2), (8, 8, 4), (8, 12, 4), (6, 8, 2), (7, 8, 4), (5, 5, 1), (64, 72, 8), (3, 12, 3))
"""Experts, places and ranks: with and without copies, one rank, more copies of one than ranks."""
KINDS = ("even", "skewed", "one", "few", "none", "huge")


def loads(kind: str, mixtures: int, experts: int) -> Tensor:
    """[M, L] int64: tokens that went to each expert, in one of :data:`KINDS`."""
    generator = torch.Generator().manual_seed(experts)
    shape = (mixtures, experts)
    if kind == "skewed":
        return (torch.rand(shape, generator=generator) ** 4 * 1000).long()
    if kind == "huge":
        return torch.randint(1 << 40, 1 << 50, shape, generator=generator)
    found = torch.full(shape, 10 if kind == "even" else 0)
    if kind == "one":
        found[:, experts - 1] = 1000
    if kind == "few":
        found[:, ::3] = torch.randint(1, 100, found[:, ::3].shape, generator=generator)
    return found


def busiest(weight: Tensor, physical: Tensor, ranks: int) -> list[float]:
    """Tokens of each mixture's busiest rank, if copies of an expert are equally used.

    Args:
        weight: [M, L].
        physical: [M, R], the expert in each place.
    """
    most = []
    for own, places in zip(weight.tolist(), physical.tolist(), strict=True):
        size = len(places) // ranks
        of_ranks = [places[rank * size : (rank + 1) * size] for rank in range(ranks)]
        most.append(max(sum(own[e] / places.count(e) for e in one) for one in of_ranks))
    return most


class EPLBPolicyConformance:
    """Inherit and override :meth:`policy`. The engine asks with one group on one node."""

    mixtures = 3

    def policy(self) -> Any:
        """The class behind the entry point."""
        raise NotImplementedError

    def placed(self, weight: Tensor, places: int, ranks: int) -> Any:
        return self.policy().rebalance_experts(weight, places, 1, 1, ranks)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("experts", "places", "ranks"), SIZES)
    def test_each_place_has_an_expert_and_each_expert_a_place(
        self, experts: int, places: int, ranks: int, kind: str
    ) -> None:
        found = self.placed(loads(kind, self.mixtures, experts), places, ranks)
        physical = found.physical_to_logical
        assert physical.dtype is torch.int64
        assert physical.shape == (self.mixtures, places)
        for row in physical.tolist():
            assert set(row) == set(range(experts))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("experts", "places", "ranks"), SIZES)
    def test_the_maps_say_the_same(self, experts: int, places: int, ranks: int, kind: str) -> None:
        found = self.placed(loads(kind, self.mixtures, experts), places, ranks)
        most = places - experts + 1
        assert found.logical_to_physical.shape == (self.mixtures, experts, most)
        assert found.counts.shape == (self.mixtures, experts)
        assert found.logical_to_physical.dtype is found.counts.dtype is torch.int64
        physical = found.physical_to_logical.tolist()
        for mixture, row in enumerate(found.logical_to_physical.tolist()):
            for expert, (copies, count) in enumerate(
                zip(row, found.counts[mixture].tolist(), strict=True)
            ):
                there = copies[:count]
                assert copies[count:] == [-1] * (most - count)
                assert sorted(there) == [
                    place for place, one in enumerate(physical[mixture]) if one == expert
                ]

    @pytest.mark.parametrize(("experts", "places", "ranks"), SIZES)
    def test_the_same_loads_are_placed_the_same_way(
        self, experts: int, places: int, ranks: int
    ) -> None:
        """Experts that need not move stay where they are."""
        weight = loads("skewed", self.mixtures, experts)
        first, again = (self.placed(weight.clone(), places, ranks) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))

    def test_the_loads_stay_as_they_are(self) -> None:
        weight = loads("skewed", self.mixtures, 8)
        kept = weight.clone()
        self.placed(weight, 12, 4)
        assert torch.equal(weight, kept)

    @pytest.mark.parametrize(
        ("experts", "places", "ranks"), [(64, 64, 8), (64, 72, 8), (12, 16, 4)]
    )
    def test_the_busiest_rank_has_less_than_without_a_policy(
        self, experts: int, places: int, ranks: int
    ) -> None:
        """Compared with experts in the order of their numbers, and copies of the first ones behind."""
        weight = torch.arange(experts, 0, -1).pow(2).expand(self.mixtures, -1)
        plain = (torch.arange(places) % experts).expand(self.mixtures, -1)
        found = self.placed(weight.contiguous(), places, ranks).physical_to_logical
        for better, worse in zip(
            busiest(weight, found, ranks), busiest(weight, plain, ranks), strict=True
        ):
            assert better < worse
