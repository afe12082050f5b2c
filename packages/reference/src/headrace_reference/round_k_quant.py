"""``round_k_quant``: a weight in the numbers of GGUF's k-quants.

For each candidate, numbers are rounded to codes, and the best scale for these codes is found in closed form;
the candidate of the least error is kept. Scales are then rounded themselves, and codes are found once more.

Every step is one float32 operation per element and sums have a stated order, so that a native
implementation can be bit-equal (and is held to it). Groups are columns, [G, groups].
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_core.ops import QuantizedWeight

_BLOCK = 256
_SHRINKS = (1.0, 0.92, 0.84, 0.76)
"""Fractions of a group's range that are tried: what is beyond is cut off, and all other steps get finer.
Twice as many lower the error of 4 bits by 0.7 %."""
_TINY = 1e-30
"""Spans and sums of squares below are zero."""
_WEIGHTS_AT_ONCE = 1 << 18
"""Weights rounded at a time: intermediate results stay in the second cache."""


def round_k_quant(weight: Tensor, bits: int) -> QuantizedWeight:
    """See :class:`headrace_core.ops.optional.round_k_quant.RoundKQuantOp`."""
    found = _unset(weight, bits)
    step = max(1, _WEIGHTS_AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        piece = weight[rows].float()
        parts = _six_bits_of(piece) if bits == 6 else _with_minimums(piece, bits)
        for name, part in parts.items():
            getattr(found, name)[rows] = part
    floats = (weight, found.block_scales, found.block_minimums)
    if not all(part is None or bool(part.isfinite().all()) for part in floats):
        raise WeightsError("the weight holds infinities or NaN")
    return found


def fake_round_k_quant(weight: Tensor, bits: int) -> QuantizedWeight:
    return _unset(weight, bits)


def _unset(weight: Tensor, bits: int) -> QuantizedWeight:
    """Numbers of the right shapes; they are unset but for zero points."""
    rows, inputs = weight.shape
    size = 16 if bits == 6 else 32

    def floats(count: int) -> Tensor:
        return torch.empty(rows, count, dtype=torch.float32, device=weight.device)

    groups, blocks = inputs // size, inputs // _BLOCK
    values = torch.empty(rows, inputs, dtype=torch.int8, device=weight.device)
    if bits == 6:
        return QuantizedWeight(
            values, floats(groups), bits=6, group_size=size, block_scales=floats(blocks),
            block_size=_BLOCK,
        )  # fmt: skip
    zeros = torch.full((rows, groups), -(1 << bits - 1), dtype=torch.int8, device=weight.device)
    return QuantizedWeight(
        values, floats(groups), zeros, bits, size, minimums=floats(groups),
        block_scales=floats(blocks), block_minimums=floats(blocks), block_size=_BLOCK,
    )  # fmt: skip


# --- 4 and 5 bits: groups of 32 with a scale and a minimum of 6 bits each ---------------------


def _with_minimums(weight: Tensor, bits: int) -> dict[str, Tensor]:
    rows, middle = len(weight), 1 << bits - 1
    groups = weight.reshape(-1, 32).T.contiguous()
    scale, minimum = _asymmetric(groups, 2 * middle - 1)
    step, scales = _six_bits(scale.view(-1, 8))
    least, minimums = _six_bits(minimum.view(-1, 8))
    finer = _inverse(step * scales).view(-1)
    offset = (least * minimums).view(-1) * finer - middle
    codes = (groups * finer + offset).round().clamp(-middle, middle - 1)
    parts = {
        "values": codes.T.to(torch.int8), "scales": scales, "minimums": minimums,
        "block_scales": step, "block_minimums": least,
    }  # fmt: skip
    return {name: part.reshape(rows, -1) for name, part in parts.items()}


def _asymmetric(groups: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Scales and minimums [groups] of codes within [0, high]; minimums are not negative."""
    least = groups.amin(0).clamp(max=0)
    span = groups.amax(0).clamp(min=0) - least
    all_numbers = _total(groups)
    scale = minimum = torch.zeros_like(span)
    least_error = torch.full_like(span, torch.inf)
    for shrink in _SHRINKS:
        finer = _inverse(span * (shrink / high))
        codes = (groups * finer - least * shrink * finer).round().clamp(0, high)
        squares, products = _total(codes * codes), _total(codes * groups)
        line, error = _fitted(_total(codes), squares, products, all_numbers, len(groups))
        wins = error < least_error
        least_error = torch.where(wins, error, least_error)
        scale, minimum = torch.where(wins, line[0], scale), torch.where(wins, line[1], minimum)
    return scale, minimum


def _fitted(
    sums: Tensor, squares: Tensor, products: Tensor, all_numbers: Tensor, count: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The line of least squares through codes and numbers, whose minimum is not negative; its squared error,
    but for the sum of the numbers' squares."""
    spread = squares * count - sums * sums
    slope = (products * count - sums * all_numbers) / spread.clamp(min=_TINY)
    scale = torch.where(spread > 0, slope, 0)
    minimum = (scale * sums - all_numbers) / count
    alone = (products / squares.clamp(min=_TINY)).clamp(min=0)
    scale = torch.where((minimum < 0) | (scale <= 0), alone, scale)
    minimum = minimum.clamp(min=0)
    error = scale * (scale * squares - (products + minimum * sums) * 2)
    error = error + minimum * (minimum * count + all_numbers * 2)
    return (scale, minimum), error


def _six_bits(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """wanted [B, 8], not negative -> a float16's number [B, 1], and multiples of it within [0, 63]."""
    step = (wanted.amax(1, keepdim=True) / 63).half().float()
    return step, (wanted * _inverse(step)).round().clamp(0, 63)


# --- 6 bits: groups of 16 with a scale of 8 bits ----------------------------------------------


def _six_bits_of(weight: Tensor) -> dict[str, Tensor]:
    rows = len(weight)
    groups = weight.reshape(-1, 16).T.contiguous()
    wanted = _symmetric(groups, -32).view(-1, 16)
    largest = _of_largest_magnitude(wanted.amax(1, keepdim=True), wanted.amin(1, keepdim=True))
    step = (largest / -128).half().float()
    scales = (wanted * _inverse(step)).round().clamp(-128, 127)
    codes = (groups * _inverse(step * scales).view(-1)).round().clamp(-32, 31)
    parts = {"values": codes.T.to(torch.int8), "scales": scales, "block_scales": step}
    return {name: part.reshape(rows, -1) for name, part in parts.items()}


def _symmetric(groups: Tensor, low: int) -> Tensor:
    """Scales [groups] of codes within [low, -low - 1]: the number of largest magnitude takes ``low``. Larger
    numbers weigh more."""
    squares = groups * groups
    weights = squares + _total(squares) / len(groups)
    finer = _inverse(_of_largest_magnitude(groups.amax(0), groups.amin(0)) / low)
    codes = (groups * finer).round().clamp(low, -low - 1)
    weighted = codes * weights
    return _total(weighted * groups) / _total(codes * weighted).clamp(min=_TINY)


def _of_largest_magnitude(top: Tensor, least: Tensor) -> Tensor:
    return torch.where(top > -least, top, least)


def _inverse(scale: Tensor) -> Tensor:
    """One over each; 0 of what is zero or too small to tell numbers apart."""
    return torch.where(scale.abs() < _TINY, 0, 1 / scale)


def _total(numbers: Tensor) -> Tensor:
    """[G, groups] -> [groups], G a power of two: the halves are added up."""
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = numbers[:half] + numbers[half:]
    return numbers[0]
