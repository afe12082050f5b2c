"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_testing.ops.inputs import bits_equal, call_wide
from headrace_testing.ops.suite import OpSuite


class MoEConformance(OpSuite):
    """``moe`` and ``expert_linear``."""

    @pytest.mark.parametrize(
        ("experts", "top_k", "hidden", "intermediate"),
        [(1, 1, 16, 16), (4, 2, 40, 24), (8, 3, 64, 33), (16, 4, 100, 130)],
    )
    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
    def test_moe(
        self,
        op: Callable[[str], Any],
        dtype: str,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        kind: str,
    ) -> None:
        moe = op("moe")
        gate_up, down = self._experts(experts, hidden, intermediate, dtype)
        packed = moe.pack(gate_up, down)
        for rows in (0, 1, 2, 7, 33):
            x = self.rand(rows, hidden, dtype=dtype)
            weights, ids = self._routing(rows, experts, top_k)
            out = moe(x, packed, weights, ids, kind)
            expected = call_wide(_moe_of, x, gate_up, down, weights, ids, kind)
            self.check(out, expected, dtype)

    def test_moe_with_one_busy_expert_of_many(self, op: Callable[[str], Any], dtype: str) -> None:
        moe = op("moe")
        gate_up, down = self._experts(32, 40, 24, dtype)
        x = self.rand(9, 40, dtype=dtype)
        weights = torch.ones(9, 1, device=self.device)
        ids = torch.full((9, 1), 17, device=self.device)
        out = moe(x, moe.pack(gate_up, down), weights, ids, "silu")
        self.check(out, call_wide(_moe_of, x, gate_up, down, weights, ids, "silu"), dtype)

    @pytest.mark.parametrize("biased", ["both", "gate_up", "down"])
    def test_moe_with_biases(self, op: Callable[[str], Any], dtype: str, biased: str) -> None:
        moe = op("moe")
        matrices = self._experts(5, 40, 33, dtype)
        biases = [
            self.rand(5, size, dtype=dtype, seed=7) if biased in ("both", name) else None
            for name, size in (("gate_up", 66), ("down", 40))
        ]
        packed = moe.pack(*matrices, *biases)
        for rows in (1, 33):
            x = self.rand(rows, 40, dtype=dtype)
            weights, ids = self._routing(rows, 5, 2)
            out = moe(x, packed, weights, ids, "clamped_swiglu")
            arguments = (x, *matrices, weights, ids, "clamped_swiglu", *biases)
            self.check(out, call_wide(_moe_of, *arguments), dtype)

    def test_moe_keeps_nothing_that_it_packed(self, op: Callable[[str], Any], dtype: str) -> None:
        moe = op("moe")
        if not moe.pack_copies:
            pytest.skip("it keeps what it packed")
        matrices = self._experts(3, 24, 16, dtype)
        biases = self.rand(3, 32, dtype=dtype), self.rand(3, 24, dtype=dtype)
        packed = moe.pack(*matrices, *biases)
        x, routing = self.rand(4, 24, dtype=dtype), self._routing(4, 3, 2)
        before = moe(x, packed, *routing, "silu")
        for tensor in (*matrices, *biases):
            tensor.fill_(torch.nan)
        assert bits_equal(moe(x, packed, *routing, "silu"), before)

    def test_moe_with_experts_that_give_back_what_they_get(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        moe = op("moe")
        for intermediate in (33, 64):
            matrices = self._experts(3, 40, intermediate, dtype)
            packed = moe.pack(*matrices)
            for rows in (1, 33):
                x = self.rand(rows, 80, dtype=dtype)[:, 40:]
                weights, ids = self._routing(rows, 5, 3)
                for options in ({}, {"identity_scale": 0.0}):
                    out = moe(x, packed, weights, ids, "silu", identities=2, **options)
                    arguments = (x, *matrices, weights, ids, "silu")
                    expected = call_wide(_moe_of, *arguments, identities=2, **options)
                    self.check(out, expected, dtype)
        nobody = torch.full((4, 1), 3, device=self.device)
        x = self.rand(4, 40, dtype=dtype)
        assert bits_equal(moe(x, packed, None, nobody, "silu", identities=1), x)

    def test_moe_without_weights(self, op: Callable[[str], Any], dtype: str) -> None:
        moe = op("moe")
        matrices = self._experts(5, 40, 24, dtype)
        x, (weights, ids) = self.rand(7, 40, dtype=dtype), self._routing(7, 5, 2)
        packed = moe.pack(*matrices)
        ones = torch.ones_like(weights)
        assert bits_equal(
            moe(x, packed, None, ids, "silu"), moe(x, packed, ones, ids, "silu")
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("experts", "top_k", "features", "inputs"),
        [(1, 1, 16, 16), (4, 2, 40, 24), (8, 3, 33, 64), (16, 4, 130, 100)],
    )
    def test_expert_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        experts: int,
        top_k: int,
        features: int,
        inputs: int,
    ) -> None:
        """One input for all of a row's experts or one for each, apart or summed."""
        linear = op("expert_linear")
        weight = self.rand(experts, features, inputs, dtype=dtype) * inputs**-0.5
        packed = linear.pack(weight)
        assert (packed.in_features, packed.out_features) == (inputs, features)
        for rows in (0, 1, 7, 33):
            weights, ids = self._routing(rows, experts, top_k)
            each = self.rand(rows, top_k, inputs, dtype=dtype)
            for x in (self.rand(rows, inputs + 2, dtype=dtype)[:, 2:], each):
                for by in (None, weights):
                    out = linear(x, packed, ids, by)
                    self.check(out, call_wide(_experts_of, x, weight, ids, by), dtype)

    def test_expert_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = invariant_op("expert_linear")
        packed = linear.pack(self.rand(8, 33, 64, dtype=dtype))
        x, (weights, ids) = self.rand(70, 64, dtype=dtype), self._routing(70, 8, 3)

        def run(rows: Tensor) -> Tensor:
            out: Tensor = linear(x[rows], packed, ids[rows], weights[rows])
            return out

        self.check_rows(torch.arange(70, device=self.device), run, "expert_linear")

    def test_moe_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        moe = invariant_op("moe")
        packed = moe.pack(*self._experts(8, 64, 33, dtype))
        x = self.rand(70, 64, dtype=dtype)
        weights, ids = self._routing(70, 8, 3)
        tagged = torch.arange(70, device=self.device)

        def run(rows: Tensor) -> Tensor:
            out: Tensor = moe(x[rows], packed, weights[rows], ids[rows], "silu")
            return out

        self.check_rows(tagged, run, "moe")

    def _experts(
        self, experts: int, hidden: int, intermediate: int, dtype: str
    ) -> tuple[Tensor, Tensor]:
        gate_up = self.rand(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5
        down = self.rand(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5
        return gate_up, down

    def _routing(self, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
        weights, ids = self.rand(rows, experts, seed=5).softmax(-1).topk(top_k)
        return weights.contiguous(), ids.contiguous()


def _moe_of(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    kind: str,
    *biases: Tensor | None,
    **options: Any,
) -> Tensor:
    packed = reference.moe.pack(gate_up, down, *biases)
    return reference.moe(x, packed, weights, ids, kind, **options)


def _experts_of(x: Tensor, weight: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    return reference.expert_linear(x, reference.expert_linear.pack(weight), ids, weights)
