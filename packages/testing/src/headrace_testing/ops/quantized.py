"""Linear layers with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import (
    QUANT_ACTIVATIONS,
    KernelNeed,
    KernelProvider,
    QuantizedWeight,
    Rounding,
)
from headrace_reference.quantized import dequantized, float8_rows, quantize_rows
from headrace_reference.rounding import rounded
from headrace_testing.ops.inputs import bits_equal, wide
from headrace_testing.ops.suite import LINEAR_SHAPES, OpSuite
from headrace_testing.ops.weights import KINDS

E4M3 = "float8_e4m3fn"
WEIGHTS = [
    (activations, kind)
    for activations in QUANT_ACTIVATIONS
    for kind in KINDS
    if activations != "fp8" or KINDS[kind].table == E4M3
]
"""Forms of activations, and kinds of weights that they go with."""


def as_entered(x: Tensor, activations: str) -> Tensor:
    """Rows [T, K] as they enter a product, float64 on the CPU."""
    if activations == "float" or not x.numel():
        return x.cpu().double()
    codes, steps = (quantize_rows if activations == "int8" else float8_rows)(x.cpu())
    return codes.double() * steps.double()


class QuantizedConformance(OpSuite):
    """``quant_linear``: rounding, exact sums, all forms of activations."""

    quant_activations: ClassVar[Sequence[str]] = QUANT_ACTIVATIONS
    """Forms of activations that the provider serves."""
    ROUNDINGS: ClassVar = [Rounding(8), Rounding(4, 32), Rounding(4, 128), Rounding(4, 36)]

    def quantized(self, features: int, inputs: int, kind: str, seed: int = 0) -> QuantizedWeight:
        return KINDS[kind].draw(features, inputs, self.device, seed)

    def serves(self, activations: str) -> None:
        """Skips the test if the provider does not serve the form."""
        if activations not in self.quant_activations:
            pytest.skip(f"activations in {activations} are not among this class's")

    @pytest.mark.parametrize(("activations", "kind"), WEIGHTS)
    def test_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        self.serves(activations)
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
                expected = as_entered(x, activations) @ real.T
                if bias is not None:
                    expected = expected + bias.cpu().double()
                self.check(linear(x, packed, bias), expected, dtype)

    @pytest.mark.parametrize(("activations", "kind"), WEIGHTS[::2])
    def test_gated_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        self.serves(activations)
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
        for activations in self.quant_activations:
            weight = self.quantized(20, 70, "fp8" if activations == "fp8" else "int4-32-zeros")
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

    @pytest.mark.parametrize(("activations", "kind"), WEIGHTS)
    def test_routed_quant_linear(
        self,
        op: Callable[[str], Any],
        provider: KernelProvider,
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        """Each expert as by itself, to the bit if rows do not depend on each other; then their sum."""
        self.serves(activations)
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

    @pytest.mark.parametrize("kind", ["int8", "mxfp4", "fp8-e5m2"])
    def test_fp8_activations_of_other_weights_are_refused(
        self, op: Callable[[str], Any], dtype: str, kind: str
    ) -> None:
        with pytest.raises(ConfigError, match=r"model\.quantization_activations = 'fp8'.*'int8'"):
            op("quant_linear").pack(self.quantized(16, 64, kind), dtype, activations="fp8")

    def test_other_activations_are_refused(self, op: Callable[[str], Any], dtype: str) -> None:
        """By the setting's name, with what is served; of weights that would fit, and of rounding."""
        linear, weight = op("quant_linear"), self.quantized(16, 64, "fp8")
        for form in {*QUANT_ACTIVATIONS} - {*self.quant_activations}:
            match = rf"model\.quantization_activations = '{form}'.*'float'.*'int8'"
            with pytest.raises(ConfigError, match=match):
                linear.pack(weight, dtype, activations=form)
            with pytest.raises(ConfigError, match=match):
                linear.round(self.rand(16, 64), dtype, Rounding(8), activations=form)

    def test_fp8_activations_saturate_and_keep_small_numbers(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """Ties, the largest, subnormal ones of E4M3, and rows whose step is among the smallest numbers."""
        self.serves("fp8")
        table = torch.arange(127).byte().view(torch.float8_e4m3fn).float()
        between = (table[1:] + table[:-1]) / 2
        x = torch.zeros(4, 256)
        x[0, :127], x[1, :126], x[1, 200] = table, -between, 448
        x[2, :126], x[2, 200] = torch.nextafter(between, torch.tensor(1e9)), -448
        x[3] = torch.linspace(-1, 1, 256) * 1.4e-42
        x = x.to(getattr(torch, dtype)).to(self.device)
        linear, eye = op("quant_linear"), torch.eye(256).to(torch.float8_e4m3fn).view(torch.int8)
        weight = QuantizedWeight(
            (eye ^ -128).to(self.device),
            torch.ones(256, 1, device=self.device),
            table=torch.arange(256).byte().view(torch.float8_e4m3fn).float().to(self.device),
        )
        out = linear(x, linear.pack(weight, dtype, activations="fp8"))
        assert torch.equal(out.cpu().double(), as_entered(x, "fp8").to(out.dtype).double())

    def test_quant_weights_of_two_shapes_are_not_joined(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = op("quant_linear")
        each = [
            linear.pack(self.quantized(size, 64, "int8"), dtype, activations="int8")
            for size in (70, 71)
        ]
        assert linear.join(each) is None

    @pytest.mark.parametrize(("activations", "kind"), WEIGHTS)
    def test_quant_linear_is_row_invariant(
        self,
        invariant_op: Callable[[str], Any],
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        self.serves(activations)
        linear = invariant_op("quant_linear")
        for features, inputs in [(130, 513), (33, 2100)]:
            weight = self.quantized(features, inputs, kind)
            packed = linear.pack(weight, dtype, activations=activations)
            x, bias = self.rand(110, inputs, dtype=dtype), self.rand(features, dtype=dtype)
            run = functools.partial(linear, packed=packed, bias=bias)
            self.check_rows(x, run, "quant_linear")
