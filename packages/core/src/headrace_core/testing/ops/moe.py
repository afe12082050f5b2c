"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core import reference
from headrace_core.testing.ops.inputs import bits_equal, call_wide
from headrace_core.testing.ops.suite import OpSuite


class MoEConformance(OpSuite):
    """``moe``."""

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
) -> Tensor:
    packed = reference.moe.pack(gate_up, down, *biases)
    return reference.moe(x, packed, weights, ids, kind)
