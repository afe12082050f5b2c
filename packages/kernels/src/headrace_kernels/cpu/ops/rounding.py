"""Integers of real weights whose groups are wider than the native library takes.

Every step is one float32 operation per element and sums have the order of the reference, so that the
result is bit-equal to the native library's (the conformance suite holds both to it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace_core.ops import QuantizedWeight, Rounding

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS_AT_ONCE = 1 << 20
"""Weights rounded at a time: intermediate results stay small beside a layer, and in the caches."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Clipping a group's largest weights makes the steps of all others finer; each of these fractions
of the full range is tried per group, and the one of least squared error is kept."""


_LANES = 16
"""Errors of a group are summed in so many partial sums, which are then halved into one another."""


def rounded(weight: Tensor, rounding: Rounding) -> QuantizedWeight:
    """weight [N, K] of any floating dtype, in the integers that ``rounding`` says."""
    if rounding.group_size is None:
        return round_rows(weight)
    return round_groups(weight, rounding.group_size, bits=rounding.bits)


def round_rows(weight: Tensor) -> QuantizedWeight:
    """weight [N, K] -> 8 bits, one scale per row: its largest magnitude maps to 127."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], 1)
    for rows in _pieces(weight):
        wide = weight[rows].float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        step = torch.where(largest == 0, 1.0, largest / 127)  # a row of zeros stays zeros
        scales[rows] = step
        values[rows] = (wide / step).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedWeight(values, scales)


def round_groups(weight: Tensor, group_size: int, *, bits: int = 4) -> QuantizedWeight:
    """weight [N, K] -> symmetric codes and a scale per group of a row.

    A group's weight of largest magnitude maps to the lowest code, which has no positive twin, so
    a scale may be negative; see :data:`_SHRINKS` for its size. Scales are bfloat16 numbers.
    """
    num_rows, inputs = weight.shape
    groups = -(-inputs // group_size)
    values = torch.empty(num_rows, inputs, dtype=torch.int8)
    scales = torch.empty(num_rows, groups)
    for rows in _pieces(weight):
        wide = weight[rows].float()
        padded = torch.nn.functional.pad(wide, (0, groups * group_size - inputs))
        codes, step = _best_codes(padded.view(-1, groups, group_size), bits)
        values[rows] = codes.view(-1, groups * group_size)[:, :inputs]
        scales[rows] = step
    return QuantizedWeight(values, scales, bits=bits, group_size=group_size)


def _best_codes(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """weight [R, groups, G] -> codes int8 of that shape and scales [R, groups]."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    most, least = weight.amax(dim=2, keepdim=True), weight.amin(dim=2, keepdim=True)
    widest = torch.where(most > -least, most, least) / low
    best_error = torch.full_like(widest, torch.inf)
    best_scales = torch.ones_like(widest)
    scratch = torch.empty_like(weight)
    for shrink in _SHRINKS:
        scale = (widest * shrink).bfloat16().float()
        scale = torch.where(scale == 0, 1.0, scale)
        codes = torch.div(weight, scale, out=scratch).round_().clamp_(low, high)
        error = _sum_in_lanes(codes.mul_(scale).sub_(weight).square_())
        better = ~(error >= best_error)  # NaN stays, for the caller to see
        best_error = torch.where(better, error, best_error)
        best_scales = torch.where(better, scale, best_scales)
    codes = torch.div(weight, best_scales, out=scratch).round_().clamp_(low, high)
    return codes.to(torch.int8), best_scales[..., 0]


def _sum_in_lanes(x: Tensor) -> Tensor:
    """x [R, groups, G] -> [R, groups, 1]: element k in partial sum k mod 16, in order of k."""
    x = torch.nn.functional.pad(x, (0, -x.shape[2] % _LANES))
    sums = x[..., :_LANES].clone()
    for at in range(_LANES, x.shape[2], _LANES):
        sums += x[..., at : at + _LANES]
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums


def _pieces(weight: Tensor) -> list[slice]:
    size = max(1, _WEIGHTS_AT_ONCE // max(1, weight.shape[1]))
    return [slice(at, at + size) for at in range(0, weight.shape[0], size)]
