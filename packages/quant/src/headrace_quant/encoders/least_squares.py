"""Scales that round groups of numbers with the least squared error.

For each candidate, numbers are rounded to codes, and the best scale for these codes is found in closed form;
the candidate of the least error is kept.

Groups are columns, [G, groups]: then every step, sums over a group included, is one pass over numbers side
by side. Steps are single operations of float32 in a stated order, so that neither the number of threads nor
the size of a piece changes a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import WeightsError

SHRINKS = (1.0, 0.92, 0.84, 0.76)
"""Fractions of a group's range that are tried: what is beyond is cut off, and all other steps get finer.
Twice as many lower the error of 4 bits by 0.7 %."""
_AT_ONCE = 1 << 18
"""Numbers that are rounded at a time: intermediate results stay in the second cache."""
_TINY = 1e-30
"""Spans and sums of squares below are zero."""


class Scales(NamedTuple):
    """Groups of numbers as ``codes * scale - minimum``: float32 [groups] each."""

    scale: Tensor
    minimum: Tensor
    """Not negative; zeros of what is symmetric."""


def finite(weight: Tensor) -> Tensor:
    """The weight in float32.

    Raises:
        WeightsError: it holds infinities or NaN.
    """
    wide = weight.float()
    if not bool((wide * 0).sum() == 0):
        raise WeightsError("the weight holds infinities or NaN")
    return wide


def columns(weight: Tensor, size: int) -> Tensor:
    """Groups of ``size`` inputs, row after row: weight [R, K] -> float32 [size, R * K / size].

    Raises:
        WeightsError: it holds infinities or NaN.
    """
    groups = weight.reshape(-1, size)
    found = torch.empty(size, len(groups)).copy_(groups.T)
    return finite(found)


def rows_at_once(inputs: int) -> int:
    """Rows of a weight that are rounded together, so that intermediate results stay small."""
    return max(1, _AT_ONCE // max(1, inputs))


def symmetric(
    groups: Tensor,
    low: int,
    high: int,
    *,
    signed_scale: bool = False,
) -> Tensor:
    """Scales [groups] of codes within [low, high].

    Args:
        groups: float32 [G, groups]; G is a power of two.
        signed_scale: the number of largest magnitude takes the code ``low``, so that the scale may be
            negative, as formats of blocks have it.
    """
    top, least = groups.amax(0), groups.amin(0)
    if signed_scale:
        widest = torch.where(top > -least, top, least) / low
    else:
        widest = torch.maximum(top, -least) / high
    weight = groups * groups
    weight += _totals(weight.clone()) / len(groups)
    kept = torch.empty(2, *groups.shape)
    sums = torch.empty(len(SHRINKS), 2, groups.shape[1])
    for at, shrink in enumerate(SHRINKS):
        codes = torch.mul(groups, inverse(widest * shrink), out=kept[0])
        torch.mul(codes.round_().clamp_(low, high), weight, out=kept[1])
        codes *= kept[1]
        kept[1] *= groups
        sums[at] = _totals(kept)
    norms, products = sums.unbind(1)
    norms = norms.clamp(min=_TINY)
    # Of a code's best scale, product / norm, the error is what this leaves of the sum of squares.
    best = (products * products / norms).argmax(0, keepdim=True)
    return (products / norms).gather(0, best)[0]


def asymmetric(groups: Tensor, high: int) -> Scales:
    """Scales and minimums of codes within [0, high]; groups float32 [G, groups], G a power of two."""
    least = groups.amin(0).clamp(max=0)
    span = groups.amax(0).clamp(min=0) - least
    kept = torch.empty(3, *groups.shape)
    found = torch.empty(len(SHRINKS), 3, groups.shape[1])
    for at, shrink in enumerate(SHRINKS):
        finer = inverse(span * (shrink / high))
        codes = torch.mul(groups, finer, out=kept[0]).sub_(least * shrink * finer)
        torch.mul(codes.round_().clamp_(0, high), codes, out=kept[1])
        torch.mul(codes, groups, out=kept[2])
        found[at] = _totals(kept)
    sums, squares, products = found.unbind(1)
    total = _totals(groups.clone())
    scale, minimum = _fitted(len(groups), sums, squares, products, total)
    # The error, but for the sum of the numbers' squares, which all candidates share.
    error = scale * (scale * squares - 2 * (products + minimum * sums))
    error += minimum * (len(groups) * minimum + 2 * total)
    best = error.argmin(0, keepdim=True)
    return Scales(scale.gather(0, best)[0], minimum.gather(0, best)[0])


def inverse(scale: Tensor) -> Tensor:
    """One over each; 0 of what is zero or too small to tell numbers apart."""
    return torch.where(scale.abs() < _TINY, 0.0, 1 / scale)


def _fitted(
    count: int, sums: Tensor, squares: Tensor, products: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The line of least squares through codes and numbers; its minimum is not negative."""
    spread = count * squares - sums * sums
    scale = torch.where(spread > 0, (count * products - sums * total) / spread.clamp(min=_TINY), 0)
    minimum = (scale * sums - total) / count
    through_zero = (minimum < 0) | (scale <= 0)
    alone = products / squares.clamp(min=_TINY)
    return torch.where(through_zero, alone.clamp(min=0), scale), minimum.clamp(min=0)


def _totals(numbers: Tensor) -> Tensor:
    """Sums of columns, [..., G, groups] -> [..., groups]; numbers are overwritten.

    Halves are added up, in an order that the number of threads does not change (that of ``sum`` may).
    """
    while (half := numbers.shape[-2] // 2) > 0:
        upper = numbers[..., half:, :]
        numbers = numbers[..., :half, :]
        numbers += upper
    return numbers[..., 0, :]
