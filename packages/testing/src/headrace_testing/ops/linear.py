"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.ops import ACTIVATIONS
from headrace_testing.ops.inputs import bits_equal
from headrace_testing.ops.suite import LINEAR_SHAPES, OpSuite


class LinearConformance(OpSuite):
    """``linear``: packing, products, rows, the forms with an activation."""

    @pytest.mark.parametrize(("features", "inputs"), LINEAR_SHAPES)
    @pytest.mark.parametrize("biased", [False, True])
    def test_linear(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int, biased: bool
    ) -> None:
        linear = op("linear")
        weight = self.rand(features, inputs, dtype=dtype) * inputs**-0.5
        bias = self.rand(features, dtype=dtype) if biased else None
        packed = linear.pack(weight)
        assert (packed.in_features, packed.out_features) == (inputs, features)
        assert packed.dtype == dtype
        assert packed.num_bytes >= weight.numel() * weight.element_size()
        for rows in (0, 1, 2, 5, 6, 7, 33, 100):
            x = self.rand(rows, inputs, dtype=dtype)
            expected = x.cpu().double() @ weight.cpu().double().T
            if bias is not None:
                expected = expected + bias.cpu().double()
            self.check(linear(x, packed, bias), expected, dtype)

    def test_linear_of_strided_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("linear")
        weight = self.rand(40, 64, dtype=dtype) / 8
        x = self.rand(9, 100, dtype=dtype)[::2, 20:84]
        expected = x.cpu().double() @ weight.cpu().double().T
        self.check(linear(x, linear.pack(weight)), expected, dtype)

    def test_packing_keeps_every_weight(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("linear")
        weight = self.rand(67, 35, dtype=dtype)
        unit = torch.eye(35, dtype=weight.dtype, device=self.device)
        assert torch.equal(linear(unit, linear.pack(weight)), weight.T)

    @pytest.mark.parametrize(("features", "inputs"), LINEAR_SHAPES)
    def test_rows_of_a_packed_weight(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        linear = op("linear")
        weight = self.rand(features, inputs, dtype=dtype)
        packed = linear.pack(weight)
        every = torch.arange(features, device=self.device)
        assert torch.equal(linear.rows(every, packed), weight)
        some = torch.tensor([features - 1, 0, features // 2], device=self.device)
        assert torch.equal(linear.rows(some[:2], packed), weight[some[:2]])
        assert linear.rows(some[:0], packed).shape == (0, inputs)

    def test_packing_that_copies_lets_the_weight_go(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = op("linear")
        weight = self.rand(67, 35, dtype=dtype)
        kept = weight.clone()
        packed = linear.pack(weight)
        if linear.pack_copies:
            weight.zero_()
        assert torch.equal(linear.rows(torch.arange(67, device=self.device), packed), kept)

    @pytest.mark.parametrize(("features", "inputs"), [(257, 1000), (33, 17), (64, 2048)])
    def test_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        linear = invariant_op("linear")
        packed = linear.pack(self.rand(features, inputs, dtype=dtype))
        x, bias = self.rand(110, inputs, dtype=dtype), self.rand(features, dtype=dtype)
        self.check_rows(x, lambda rows: linear(rows, packed, bias), "linear")

    def check_activated(self, op: Callable[[str], Any], packed: Any, x: Tensor) -> None:
        """``activated`` is its two steps, bit for bit, with every activation, with and without bias."""
        linear, second_step = op("linear"), op("activation")
        bias = self.rand(packed.out_features, dtype=packed.dtype)
        for kind, added in [*((kind, None) for kind in ACTIVATIONS), ("gelu", bias)]:
            expected = second_step(linear(x, packed, added), kind)
            assert bits_equal(linear.activated(x, packed, kind, added), expected), (kind, x.shape)

    @pytest.mark.parametrize(("features", "inputs"), LINEAR_SHAPES)
    def test_activated_linear(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        packed = op("linear").pack(self.rand(features, inputs, dtype=dtype) * inputs**-0.5)
        for rows in (0, 1, 7, 200):
            self.check_activated(op, packed, self.rand(rows, inputs, dtype=dtype))
        self.check_activated(op, packed, self.rand(9, inputs + 8, dtype=dtype)[::2, 8:])

    def test_activated_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = invariant_op("linear")
        packed = linear.pack(self.rand(257, 1000, dtype=dtype))
        x, bias = self.rand(110, 1000, dtype=dtype), self.rand(257, dtype=dtype)
        self.check_rows(x, lambda rows: linear.activated(rows, packed, "gelu", bias), "activated")

    GATED_SHAPES: ClassVar = [(2, 1), (64, 33), (130, 64), (128, 64), (384, 1100)]
    """(N, K): gates that end inside whatever an implementation cuts outputs into, and at its ends."""

    @pytest.mark.parametrize(("features", "inputs"), GATED_SHAPES)
    def test_gated_linear(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        packed = op("linear").pack(self.rand(features, inputs, dtype=dtype) * inputs**-0.5)
        for rows in (0, 1, 5, 7, 200):
            self.check_gated(op, "linear", packed, self.rand(rows, inputs, dtype=dtype))
        strided = self.rand(9, inputs + 8, dtype=dtype)[::2, 8:]
        self.check_gated(op, "linear", packed, strided)

    def test_gated_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = invariant_op("linear")
        packed = linear.pack(self.rand(256, 1100, dtype=dtype))
        x, bias = self.rand(110, 1100, dtype=dtype), self.rand(256, dtype=dtype)
        self.check_rows(x, lambda rows: linear.gated(rows, packed, "silu", bias), "gated linear")
