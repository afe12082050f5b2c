"""Routing of rows to experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_testing.ops.inputs import bits_equal, call_wide
from headrace_testing.ops.suite import OpSuite

GROUPED = {"num_groups": 4, "top_groups": 2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "renormalised": {"renormalise": True, "scale": 2.5},
    "sigmoid": {"scoring": "sigmoid", "scale": 0.5},
    "sigmoid-groups": {"scoring": "sigmoid", **GROUPED, "group_score": "top2"},
    "groups": GROUPED,
    "sparsemixer": {"scoring": "sparsemixer", "jitter": 0.3},
    "sparsemixer-renormalised": {"scoring": "sparsemixer", "jitter": 0.01, "renormalise": True},
}
CORRECTED: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"renormalise": True},
    "sigmoid": {"scoring": "sigmoid", "renormalise": True, "scale": 1.7},
    "groups": {"scoring": "sigmoid", **GROUPED, "group_score": "max"},
    "groups-top2": {"scoring": "sigmoid", **GROUPED, "group_score": "top2", "renormalise": True},
}


class RoutingConformance(OpSuite):
    """``route_experts``."""

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize(("experts", "k"), [(1, 1), (4, 2), (8, 4), (60, 4), (128, 8)])
    def test_route_experts(
        self, op: Callable[[str], Any], dtype: str, experts: int, k: int, variant: str
    ) -> None:
        options = VARIANTS[variant]
        if experts % options.get("num_groups", 1) or k > experts // 2 > 0:
            pytest.skip("groups of another size")
        for rows in (0, 1, 2, 7, 33):
            x = self.rand(rows, experts, dtype=dtype) * 4
            weights, ids = op("route_experts")(x, k, **options)
            expected, chosen = call_wide(reference.route_experts, x, k, **options)
            self.check(weights, expected, "float32")
            assert torch.equal(ids.cpu(), chosen)

    @pytest.mark.parametrize("variant", CORRECTED)
    def test_route_experts_by_corrected_scores(
        self, op: Callable[[str], Any], dtype: str, variant: str
    ) -> None:
        """A bias so large that it changes most choices, some of it far below 0."""
        options = {**CORRECTED[variant], "bias": self.rand(24, seed=3)}
        x = self.rand(9, 24, dtype=dtype)
        weights, ids = op("route_experts")(x, 5, **options)
        expected, chosen = call_wide(reference.route_experts, x, 5, **options)
        self.check(weights, expected, "float32")
        assert torch.equal(ids.cpu(), chosen)
        assert not torch.equal(chosen, call_wide(reference.route_experts, x, 5)[1])

    @pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparsemixer"])
    def test_route_experts_of_equal_scores(
        self, op: Callable[[str], Any], dtype: str, scoring: str
    ) -> None:
        x = torch.zeros(2, 9, dtype=getattr(torch, dtype), device=self.device)
        x[1, 7] = 1
        _, ids = op("route_experts")(x, 3, scoring=scoring, renormalise=True)
        assert ids.tolist() == [[0, 1, 2], [7, 0, 1]]

    def test_route_experts_that_all_score_nothing(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        x = torch.full((1, 8), -300.0, dtype=getattr(torch, dtype), device=self.device)
        weights, _ = op("route_experts")(x, 2, scoring="sigmoid", renormalise=True)
        assert bool(weights.isfinite().all())

    def test_route_experts_of_a_slice(self, op: Callable[[str], Any], dtype: str) -> None:
        x = self.rand(5, 40, dtype=dtype)
        weights, ids = op("route_experts")(x[:, 4:20], 3)
        whole, same = op("route_experts")(x[:, 4:20].contiguous(), 3)
        assert bits_equal(weights, whole)
        assert torch.equal(ids, same)

    def test_route_experts_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run = invariant_op("route_experts")
        x, bias = self.rand(70, 60, dtype=dtype), self.rand(60, seed=1)

        def corrected(rows: Tensor) -> Tensor:
            weights: Tensor = run(rows, 4, scoring="sigmoid", bias=bias, renormalise=True)[0]
            return weights

        self.check_rows(x, lambda rows: run(rows, 4)[0], "route_experts")
        self.check_rows(x, corrected, "route_experts")
