"""Linear layers with integer weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import WeightsError
from headrace_core.ops import (
    QUANT_ACTIVATIONS,
    KernelNeed,
    KernelProvider,
    QuantizedWeight,
    Rounding,
)
from headrace_reference.quantized import dequantized, quantize_rows
from headrace_reference.rounding import rounded
from headrace_testing.ops.inputs import bits_equal, wide
from headrace_testing.ops.suite import LINEAR_SHAPES, OpSuite
from headrace_testing.ops.weights import KINDS


class QuantizedConformance(OpSuite):
    """``quant_linear``: rounding, exact sums, both kinds of activations."""

    ROUNDINGS: ClassVar = [Rounding(8), Rounding(4, 32), Rounding(4, 128), Rounding(4, 36)]

    def quantized(self, features: int, inputs: int, kind: str, seed: int = 0) -> QuantizedWeight:
        return KINDS[kind].draw(features, inputs, self.device, seed)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        linear = op("quant_linear")
        for features, inputs in LINEAR_SHAPES:
            weight = self.quantized(features, inputs, kind)
            real = dequantized(weight, torch.float64).cpu()
            packed = linear.pack(weight, dtype, activations=activations)
            assert (packed.in_features, packed.out_features) == (inputs, features)
            assert packed.dtype == dtype
            for rows, biased in ((0, False), (1, True), (2, False), (7, True), (33, False)):
                x = self.rand(rows, inputs, dtype=dtype)
                bias = self.rand(features, dtype=dtype) if biased else None
                entered = x.cpu().double()
                if activations == "int8" and rows:
                    codes, steps = quantize_rows(x.cpu())
                    entered = codes.double() * steps.double()
                expected = entered @ real.T
                if bias is not None:
                    expected = expected + bias.cpu().double()
                self.check(linear(x, packed, bias), expected, dtype)

    @pytest.mark.parametrize("kind", [*KINDS][::2])
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_gated_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        for features, inputs in [(130, 64), (384, 1100)]:
            weight = self.quantized(features, inputs, kind)
            packed = op("quant_linear").pack(weight, dtype, activations=activations)
            for rows in (0, 1, 7, 130):
                self.check_gated(op, "quant_linear", packed, self.rand(rows, inputs, dtype=dtype))

    def test_quant_linear_sums_integers_exactly(self, op: Callable[[str], Any], dtype: str) -> None:
        """The largest sums that there are, which no shortcut in 16 bits survives."""
        linear = op("quant_linear")
        inputs = 4096
        values = torch.full((3, inputs), -128, dtype=torch.int8)
        values[1] = 127
        values[2, ::2] = 127
        scales = torch.full((3, 1), 1 / inputs, device=self.device)
        packed = linear.pack(
            QuantizedWeight(values.to(self.device), scales), dtype, activations="int8"
        )
        x = torch.ones(2, inputs, dtype=getattr(torch, dtype), device=self.device)
        x[1, 1::2] = -1
        self.check(linear(x, packed), x.cpu().double() @ values.double().T / inputs, dtype)

    def test_quant_linear_of_odd_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        """Rows of zeros give the bias, rows with no number in them give none, others do not mind."""
        linear = op("quant_linear")
        weight = self.quantized(20, 70, "int4-32-zeros")
        for activations in QUANT_ACTIVATIONS:
            packed = linear.pack(weight, dtype, activations=activations)
            x, bias = self.rand(5, 70, dtype=dtype), self.rand(20, dtype=dtype)
            before = linear(x, packed, bias)
            x[1] = 0
            x[2, 3], x[4, 69] = torch.nan, torch.inf
            out = linear(x, packed, bias)
            assert torch.equal(out[1], bias)
            assert not out[[2, 4]].isfinite().any()
            torch.testing.assert_close(out[[0, 3]], before[[0, 3]])

    def test_quant_linear_of_strided_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("quant_linear")
        weight = self.quantized(40, 64, "int8")
        x = self.rand(9, 100, dtype=dtype)[::2, 20:84]
        expected = x.cpu().double() @ dequantized(weight, torch.float64).cpu().T
        packed = linear.pack(weight, dtype, activations="float")
        self.check(linear(x, packed), expected, dtype)

    @pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
    def test_quant_linear_rounds_as_defined(
        self, op: Callable[[str], Any], dtype: str, rounding: Rounding
    ) -> None:
        """Bit for bit what rounding in torch and packing the integers gives."""
        linear = op("quant_linear")
        for rows, inputs in [(1, 1), (70, 200), (33, 333)]:
            weight = self.rand(rows, inputs + 3, dtype=dtype)[:, 1:-2]
            weight[:: rows // 3 + 1] = 0
            weight[rows // 2] *= 1e-3
            whole = rounded(weight.cpu(), rounding)
            integers = replace(
                whole, values=whole.values.to(self.device), scales=whole.scales.to(self.device)
            )
            x = torch.eye(inputs, device=self.device)
            expected = linear(x, linear.pack(integers, "float32", activations="float"))
            packed = linear.round(weight, "float32", rounding, activations="float")
            assert (packed.in_features, packed.out_features) == (inputs, rows)
            assert bits_equal(linear(x, packed), expected)

    @pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_quant_linear_rounds_numbers_only(
        self, op: Callable[[str], Any], dtype: str, rounding: Rounding, bad: float
    ) -> None:
        weight = self.rand(20, 70, dtype=dtype)
        weight[19, 69] = bad
        with pytest.raises(WeightsError, match="infinities or NaN"):
            op("quant_linear").round(weight, dtype, rounding, activations="float")

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_of_quant_linear(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        """Within the last bit: a sum's order is open, its rounding to 16 bits is not."""
        for features, inputs in LINEAR_SHAPES:
            weight = self.quantized(features, inputs, kind)
            packed = op("quant_linear").pack(weight, dtype, activations="float")
            ids = torch.arange(features, device=self.device).flip(0)[:50]
            expected = dequantized(weight, torch.float64).cpu()[ids.cpu()]
            self.check(op("quant_linear").rows(ids, packed), expected, dtype)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_routed_quant_linear(
        self,
        op: Callable[[str], Any],
        provider: KernelProvider,
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        """Each expert as by itself, to the bit if rows do not depend on each other; then their sum."""
        linear = op("quant_linear")
        each = [
            linear.pack(self.quantized(70, 100, kind, seed), dtype, activations=activations)
            for seed in range(5)
        ]
        joined, biases = linear.join(each), self.rand(5, 70, dtype=dtype, seed=3)
        assert (joined.in_features, joined.out_features) == (100, 70)
        exact = provider.row_invariant(KernelNeed(device=self.device, dtype=dtype))
        for rows in (0, 1, 9):
            weights, ids = self.rand(rows, 5, seed=5).softmax(-1).topk(3)
            own = self.rand(rows, 3, 100, dtype=dtype)
            for x in (self.rand(rows, 103, dtype=dtype)[:, 3:], own):
                out = linear.routed(x, joined, ids, None, biases)
                assert out.shape == (rows, 3, 70)
                for row, place in [(r, p) for r in range(rows) for p in range(3)]:
                    expert = int(ids[row, place])
                    alone = (x[row] if x.dim() == 2 else x[row, place])[None]
                    expected = linear(alone, each[expert], biases[expert])[0]
                    if exact:
                        assert bits_equal(out[row, place], expected)
                    else:
                        self.check(out[row, place], expected.cpu(), dtype)
                total = (wide(out) * wide(weights)[..., None]).sum(1)
                self.check(linear.routed(x, joined, ids, weights, biases), total, dtype)

    def test_quant_weights_of_two_shapes_are_not_joined(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = op("quant_linear")
        each = [
            linear.pack(self.quantized(size, 64, "int8"), dtype, activations="int8")
            for size in (70, 71)
        ]
        assert linear.join(each) is None

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_quant_linear_is_row_invariant(
        self,
        invariant_op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        linear = invariant_op("quant_linear")
        for features, inputs in [(130, 513), (33, 2100)]:
            weight = self.quantized(features, inputs, kind)
            packed = linear.pack(weight, dtype, activations=activations)
            x, bias = self.rand(110, inputs, dtype=dtype), self.rand(features, dtype=dtype)
            run = functools.partial(linear, packed=packed, bias=bias)
            self.check_rows(x, run, "quant_linear")
