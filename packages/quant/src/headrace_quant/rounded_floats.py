"""Linear layers that are rounded to a code book while they are loaded: NF4, FP4, MXFP4, FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.code_books import E8M0_BIAS, float8_table, octet_codes, powers_of_two, table
from headrace_quant.int_linear_methods import IntegerMethod

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 1 << 22
"""Weights that are rounded at once."""
_OCTETS = 256
_LEAST = 1e-38
"""Least scale that weights are divided by."""


@dataclass(frozen=True, slots=True)
class CodeBook:
    """Rounding of a group of weights: to the nearest number of a table, times the group's scale."""

    values: tuple[float, ...]
    """By code; 16 of them, or 256 of E4M3."""
    group_size: int | None
    """Inputs that share a scale; None: all."""
    in_powers: bool = False
    """Scales are powers of two, as E8M0 has them (OCP MX 1.0, section 6.3); else the largest magnitude over
    the table's."""

    @property
    def bits(self) -> int:
        """Of a code."""
        return len(self.values).bit_length() - 1

    def scales(self, largest: Tensor) -> Tensor:
        """largest [...], the magnitudes of groups -> scales float32."""
        top = max(abs(value) for value in self.values if value == value)
        if not self.in_powers:
            return largest / top
        # The largest power of two in a group over the largest in the table.
        exponents = torch.frexp(largest).exponent - int(torch.frexp(torch.tensor(top)).exponent)
        stored = torch.where(largest > 0, exponents + E8M0_BIAS, E8M0_BIAS)
        return powers_of_two(stored.clamp(0, 2 * E8M0_BIAS))

    def codes(self, scaled: Tensor) -> Tensor:
        """scaled, of any shape -> int8 codes less half their number; of two that are as near, the lower
        number; with :attr:`in_powers` the one whose code is even."""
        if len(self.values) == _OCTETS:
            top = torch.finfo(torch.float8_e4m3fn).max
            return octet_codes(scaled.clamp(-top, top).to(torch.float8_e4m3fn))
        numbers, order = table(self.values, scaled).sort(stable=True)
        bounds = (numbers[1:] + numbers[:-1]) / 2
        places = torch.bucketize(scaled, bounds)
        if self.in_powers:
            above = torch.bucketize(scaled, bounds, right=True)
            places = torch.where(order[places] % 2 == 0, places, above)
        return (order[places] - len(self.values) // 2).to(torch.int8)

    def round(self, weight: Tensor) -> QuantizedWeight:
        """weight [N, K] of any floating dtype -> what is nearest to it."""
        rows, inputs = weight.shape
        size = self.group_size or max(1, inputs)
        groups = max(1, -(-inputs // size))
        codes = torch.empty(rows, inputs, dtype=torch.int8, device=weight.device)
        scales = torch.empty(rows, groups, dtype=torch.float32, device=weight.device)
        step = max(1, _ROWS // max(1, inputs))
        for start in range(0, rows, step):
            piece = weight[start : start + step].float().contiguous()
            padded = torch.nn.functional.pad(piece, (0, groups * size - inputs))
            grouped = padded.view(len(piece), groups, size)
            largest = grouped.abs().amax(-1)
            own = self.scales(largest)
            scales[start : start + step] = own + (largest - largest)  # NaN where it is no number
            divisors = own.clamp(min=_LEAST)[..., None]
            # bitsandbytes multiplies by the inverse, which others do not.
            found = self.codes(grouped / divisors if self.bits == 8 else grouped * (1 / divisors))
            codes[start : start + step] = found.flatten(1)[:, :inputs]
        return QuantizedWeight(
            codes,
            scales,
            bits=self.bits,
            group_size=self.group_size,
            table=table(self.values, weight),
        )


FP8 = CodeBook(tuple(float8_table(torch.float8_e4m3fn, torch.empty(0)).tolist()), None)
"""E4M3 with a scale for each output."""


class RoundedFloats(IntegerMethod):
    """``weight`` of any floating dtype, rounded to a code book when it has arrived.

    Raises (from ``finish``):
        WeightsError: the weight holds infinities or NaN.
    """

    takes_views = True

    def __init__(self, ops: OpTable, book: CodeBook) -> None:
        super().__init__(ops, activations="float")
        self.book = book

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def kept_bytes(self, spec: LinearSpec) -> int:
        """Codes, and scales of float32 or of a byte."""
        rows, inputs = spec.out_features, spec.in_features
        scale = 1 if self.book.in_powers else 4
        groups = -(-inputs // (self.book.group_size or max(1, inputs)))
        return rows * -(-inputs * self.book.bits // 8) + scale * rows * groups

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        weight = self.book.round(tensors["weight"])
        if not bool(weight.scales.isfinite().all()):
            raise WeightsError(f"layer {spec.name!r}: the weight holds infinities or NaN")
        return self.pack(spec, weight)
