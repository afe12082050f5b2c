"""Linear layers with packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import PackedLinear, QuantizedWeight, Rounding
from headrace_reference.activations import activation_and_mul
from headrace_reference.dtypes import unset_like, widened
from headrace_reference.moe import chosen_experts, lines, summed
from headrace_reference.rounding import rounded


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic int8: x [T, K] -> (codes [T, K] float32 of integers in [-127, 127], steps [T, 1]).

    A row's step is its largest magnitude / 127, in float32; codes are x / step to the nearest
    integer, ties to even. A row of zeros has step 1.
    """
    x = x.float()
    steps = x.abs().amax(dim=1, keepdim=True) / 127
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    return (x / steps).round(), steps


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dynamic FP8: x [T, K] -> (numbers of E4M3 [T, K] float32, steps [T, 1]).

    A row's step is its largest magnitude / 448, in float32; numbers are x / step to the nearest one of
    E4M3, ties to even. A row of zeros has step 1, one with NaN or an infinity has no numbers.
    """
    x = x.float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    steps = x.abs().amax(dim=1, keepdim=True) / largest
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    # A step among the smallest numbers is coarse: a quotient may be beyond the largest.
    return (x / steps).clamp(-largest, largest).to(torch.float8_e4m3fn).float(), steps


def dequantized(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The real weight [N, K], in ``dtype``: see :class:`headrace_core.ops.QuantizedWeight`."""
    inputs = weight.values.shape[1]

    def spread(tensor: Tensor, size: int | None) -> Tensor:
        wide = tensor.repeat_interleave(max(1, inputs) if size is None else size, dim=1)
        return wide[:, :inputs].to(dtype)

    if weight.table is None:
        values = weight.values.to(dtype)
    else:
        values = weight.table.to(dtype)[weight.values.int() + (1 << weight.bits - 1)]
    if weight.zero_points is not None:
        values = values - spread(weight.zero_points, weight.group_size)
    real = values * spread(weight.scales, weight.group_size)
    if weight.block_scales is not None:
        real = real * spread(weight.block_scales, weight.block_size)
    if weight.minimums is not None:
        least = spread(weight.minimums, weight.group_size)
        if weight.block_minimums is not None:
            least = least * spread(weight.block_minimums, weight.block_size)
        real = real - least
    return real


class QuantLinear:
    """See :class:`headrace_core.ops.QuantLinearOp`. Packing keeps the weight as it is."""

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        if activations == "fp8" and not _is_e4m3(weight.table):
            raise ConfigError(
                "model.quantization_activations = 'fp8': of weights in E4M3 only; with this one, which has "
                f"{'another table' if weight.table is not None else 'integers'}, it must be 'auto', 'float' "
                "or 'int8'",
                field="model.quantization_activations",
            )
        parts = [getattr(weight, field.name) for field in fields(weight)]
        return PackedLinear(
            in_features=weight.values.shape[1],
            out_features=weight.values.shape[0],
            dtype=dtype,
            data=(weight, activations),
            num_bytes=sum(x.numel() * x.element_size() for x in parts if isinstance(x, Tensor)),
        )

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        integers = rounded(weight, rounding)
        if not bool(integers.scales.isfinite().all()):
            raise WeightsError("the weight holds infinities or NaN")
        return self.pack(integers, dtype, activations=activations)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        weight, activations = packed.data
        wide = widened(x)
        real = dequantized(weight, wide.dtype)
        if activations != "float" and x.shape[1]:
            codes, steps = (quantize_rows if activations == "int8" else float8_rows)(x)
            out = codes.to(wide.dtype) @ real.T * steps.to(wide.dtype)
        else:
            out = wide @ real.T
        if bias is not None:
            out = out + bias.to(wide.dtype)
        return out.to(x.dtype)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return activation_and_mul(self(x, packed, bias), kind)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        weight, _ = packed.data
        by_row = {
            name: None if (tensor := getattr(weight, name)) is None else tensor[ids]
            for name in (
                "values",
                "scales",
                "zero_points",
                "minimums",
                "block_scales",
                "block_minimums",
            )
        }
        return dequantized(replace(weight, **by_row)).to(getattr(torch, packed.dtype))

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        first = each[0]
        if any(
            (p.in_features, p.out_features) != (first.in_features, first.out_features) for p in each
        ):
            return None
        num_bytes = sum(packed.num_bytes for packed in each)
        return replace(first, data=tuple(each), num_bytes=num_bytes)

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        chosen = lines(x, ids, packed.out_features)
        for expert, rows, places in chosen_experts(ids, len(packed.data)):
            own = widened(x[rows] if x.dim() == 2 else x[rows, places])
            bias = None if biases is None else biases[expert]
            chosen[rows, places] = self(own, packed.data[expert], bias)
        return (chosen if weights is None else summed(chosen, weights)).to(x.dtype)


def _is_e4m3(table: Tensor | None) -> bool:
    """True of the numbers that E4M3's bytes stand for, in their order."""
    if table is None or len(table) != 256:
        return False
    e4m3 = torch.arange(256, device=table.device).byte().view(torch.float8_e4m3fn).float()
    return torch.allclose(table, e4m3, rtol=0, atol=0, equal_nan=True)


class _FakeQuantLinear(QuantLinear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return unset_like(x, x.shape[0], packed.out_features)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return unset_like(x, x.shape[0], packed.out_features // 2)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        return torch.empty(len(ids), packed.in_features, dtype=getattr(torch, packed.dtype))

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        rows = ids.shape if weights is None else ids.shape[:1]
        return unset_like(x, *rows, packed.out_features)


quant_linear = QuantLinear()
fake_quant_linear = _FakeQuantLinear()
