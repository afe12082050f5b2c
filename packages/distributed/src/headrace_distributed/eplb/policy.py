"""The default policy: experts with many tokens get copies, ranks get experts with about equally many tokens.

Greedy and deterministic; of equals the lower number comes first. Source: DeepSeek-AI 2024, arXiv:2412.19437,
section 3.4, and their published description of EPLB.

Letters: M mixtures of a model, L logical experts of a mixture (those that it has), R physical ones (places
for them, copies included), X = R - L + 1 most copies of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertPlaces(NamedTuple):
    """Where experts are."""

    physical_to_logical: Tensor
    """[M, R] int64: the expert in each place. Ranks have equal runs of places."""
    logical_to_physical: Tensor
    """[M, L, X] int64: the places of each expert, in the order in which copies were made; -1: no further."""
    counts: Tensor
    """[M, L] int64: places of each expert."""


class EPLBPolicy(ABC):
    """Decides where experts are; the class behind an entry point of ``headrace.eplb_policies``."""

    @classmethod
    @abstractmethod
    def rebalance_experts(
        cls, weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
    ) -> ExpertPlaces:
        """Places for experts of these loads.

        Args:
            weight: [M, L]: tokens that went to each.
            num_replicas: R; ``num_ranks`` divides it.
            num_groups: runs of neighbours that should be on one node, as tokens are routed to few of them.
            num_nodes: hosts; divides ``num_ranks``.
        """


class DefaultPolicy(EPLBPolicy):
    """See the module."""

    @classmethod
    def rebalance_experts(
        cls, weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
    ) -> ExpertPlaces:
        """See :meth:`EPLBPolicy.rebalance_experts`. If ``num_nodes`` do not divide the groups, all experts
        are one group, on one node.

        Raises:
            ValueError: numbers do not divide each other as they must.
        """
        if num_groups % num_nodes:
            num_groups, num_nodes = 1, 1
        mixtures, experts = weight.shape
        check_divides("num_groups", num_groups, "experts", experts)
        check_divides("num_nodes", num_nodes, "num_ranks", num_ranks)
        check_divides("num_ranks", num_ranks, "num_replicas", num_replicas)
        if num_replicas < experts:
            raise ValueError(f"num_replicas = {num_replicas}: must be at least {experts} experts")
        most = num_replicas - experts + 1
        physical = torch.empty(mixtures, num_replicas, dtype=torch.int64)
        logical = torch.full((mixtures, experts, most), -1, dtype=torch.int64)
        for index, loads in enumerate(weight.to(torch.float32).tolist()):
            placed = _placed(loads, num_replicas, num_groups, num_nodes, num_ranks)
            for place, (expert, copy) in enumerate(placed):
                physical[index, place] = expert
                logical[index, expert, copy] = place
        return ExpertPlaces(physical, logical, (logical >= 0).sum(-1))


def check_divides(name: str, number: int, what: str, count: int) -> None:
    """Raises: ValueError: ``number`` does not divide ``count``."""
    if count % number:
        raise ValueError(f"{name} = {number} does not divide {what} = {count}")


def balanced_packing(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Items in so many packs of equal size: the heaviest first, each to the lightest pack that has room."""
    size = len(weights) // packs
    if size == 1:
        return [[item] for item in range(packs)]
    found: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda each: -weights[each]):
        pack = min(
            (pack for pack in range(packs) if len(found[pack]) < size),
            key=lambda pack: totals[pack],
        )
        found[pack].append(item)
        totals[pack] += weights[item]
    return found


def replicated(weights: Sequence[float], replicas: int) -> list[tuple[int, int]]:
    """Experts, each once, then further copies of those with the most tokens for each copy: (expert, number of
    its copy)."""
    found = [(expert, 0) for expert in range(len(weights))]
    counts = [1] * len(weights)
    while len(found) < replicas:
        busiest = max(range(len(weights)), key=lambda each: weights[each] / counts[each])
        found.append((busiest, counts[busiest]))
        counts[busiest] += 1
    return found


def _placed(
    loads: Sequence[float], replicas: int, groups: int, nodes: int, ranks: int
) -> list[tuple[int, int]]:
    """By place of one mixture: (expert, number of its copy)."""
    size = len(loads) // groups
    of_groups = [sum(loads[start : start + size]) for start in range(0, len(loads), size)]
    found: list[tuple[int, int]] = []
    for node in balanced_packing(of_groups, nodes):
        experts = [group * size + offset for group in node for offset in range(size)]
        own = [loads[expert] for expert in experts]
        copies = replicated(own, replicas // nodes)
        counts = [0] * len(own)
        for expert, _ in copies:
            counts[expert] += 1
        each = [own[expert] / counts[expert] for expert, _ in copies]
        for rank in balanced_packing(each, ranks // nodes):
            found += [(experts[copies[slot][0]], copies[slot][1]) for slot in rank]
    return found
