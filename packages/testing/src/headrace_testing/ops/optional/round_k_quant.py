"""``round_k_quant``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_core.ops import QuantizedWeight
from headrace_reference.quantized import dequantized
from headrace_reference.round_k_quant import round_k_quant
from headrace_testing.ops.suite import OpSuite

ERRORS = {4: 0.08, 5: 0.04, 6: 0.02}
"""Bits -> most relative error of a normal distribution's weights, root mean square."""


class RoundKQuantConformance(OpSuite):
    """Bit-equal to the definition: weights of one sign, with outliers, mostly zeros, all alike, in slices."""

    def weights(self, dtype: str) -> Iterator[Tensor]:
        normal = self.rand(37, 768, dtype=dtype)
        yield normal * 0.02
        yield normal[:5, 256:512]
        yield normal.abs()
        yield -normal.abs() - 0.5
        yield normal.square() * normal * 10
        yield torch.where(normal > 0.7, normal, 0)
        yield torch.zeros_like(normal[:3])
        yield torch.full_like(normal[:3], 0.3)
        yield (normal * 3).round()
        yield normal * 1e-7
        yield normal[:0]

    @pytest.mark.parametrize("bits", ERRORS)
    def test_round_k_quant(self, op: Callable[[str], Any], dtype: str, bits: int) -> None:
        run = op("round_k_quant")
        for weight in self.weights(dtype):
            assert_equal(run(weight, bits), round_k_quant(weight.cpu(), bits))

    @pytest.mark.parametrize("bits", ERRORS)
    def test_round_k_quant_is_near(self, op: Callable[[str], Any], dtype: str, bits: int) -> None:
        weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
        weight = weight.to(getattr(torch, dtype)).to(self.device)
        found = dequantized(op("round_k_quant")(weight, bits)).cpu()
        error = float((found - weight.cpu().float()).norm() / weight.float().norm())
        assert ERRORS[bits] / 2 < error < ERRORS[bits]

    @pytest.mark.parametrize("bits", ERRORS)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_round_k_quant_refuses_what_is_no_number(
        self, op: Callable[[str], Any], dtype: str, bits: int, bad: float
    ) -> None:
        for row, column in ((0, 0), (2, 300), (2, 511)):
            weight = self.rand(3, 512, dtype=dtype)
            weight[row, column] = bad
            with pytest.raises(WeightsError, match="infinities or NaN"):
                op("round_k_quant")(weight, bits)


def assert_equal(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    """Every number of two weights."""
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, Tensor):
            assert torch.equal(one.cpu(), other), field.name
        else:
            assert one == other, field.name
