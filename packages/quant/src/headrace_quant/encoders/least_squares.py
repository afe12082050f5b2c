"""Scales that round groups of numbers with the least squared error.

For each candidate, numbers are rounded to codes, and the best scale for these codes is found in closed form;
the candidate of the least error is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import WeightsError

SHRINKS = (1.0, 0.92, 0.84, 0.76)
"""Fractions of a group's range that are tried: what is beyond is cut off, and all other steps get finer.
Twice as many lower the error of 4 bits by 0.7 %."""
_AT_ONCE = 1 << 18
"""Numbers that are rounded at a time: intermediate results stay in the second cache."""


class Rounded(NamedTuple):
    """Groups of numbers as ``codes * scale - minimum``."""

    codes: Tensor
    """[..., G] float32 of whole numbers."""
    scale: Tensor
    """[...] float32."""
    minimum: Tensor
    """[...] float32, not negative; zeros of what is symmetric."""


def finite(weight: Tensor) -> Tensor:
    """The weight in float32.

    Raises:
        WeightsError: it holds infinities or NaN.
    """
    wide = weight.float()
    if not bool(wide.isfinite().all()):
        raise WeightsError("the weight holds infinities or NaN")
    return wide


def rows_at_once(inputs: int) -> int:
    """Rows of a weight that are rounded together, so that intermediate results stay small."""
    return max(1, _AT_ONCE // max(1, inputs))


def symmetric(
    groups: Tensor,
    low: int,
    high: int,
    *,
    signed_scale: bool = False,
    shrinks: Sequence[float] = SHRINKS,
) -> Rounded:
    """groups [..., G] -> codes within [low, high].

    Args:
        signed_scale: the number of largest magnitude takes the code ``low``, so that the scale may be
            negative, as formats of blocks have it.
        shrinks: fractions that are tried; of many bits the first is the best.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    widest = largest / low if signed_scale else largest.abs() / high
    weight = groups.square() + groups.square().mean(-1, keepdim=True)
    best: Rounded | None = None
    error = torch.full_like(widest, torch.inf)
    for shrink in shrinks:
        start = torch.where(widest == 0, 1.0, widest * shrink)
        codes = (groups / start).round_().clamp_(low, high)
        square = (weight * codes * codes).sum(-1, keepdim=True)
        scale = (weight * codes * groups).sum(-1, keepdim=True) / square.clamp(min=1e-30)
        now = (weight * (codes * scale - groups).square()).sum(-1, keepdim=True)
        best, error = _better(best, Rounded(codes, scale, torch.zeros_like(scale)), error, now)
    assert best is not None
    return _squeezed(best)


def asymmetric(groups: Tensor, high: int) -> Rounded:
    """groups [..., G] -> codes within [0, high], and a minimum that is not negative."""
    least = groups.amin(-1, keepdim=True).clamp(max=0)
    span = groups.amax(-1, keepdim=True).clamp(min=0) - least
    best: Rounded | None = None
    error = torch.full_like(span, torch.inf)
    for shrink in SHRINKS:
        start = torch.where(span == 0, 1.0, span * shrink / high)
        codes = ((groups - least * shrink) / start).round_().clamp_(0, high)
        scale, minimum = _fitted(groups, codes)
        now = (codes * scale - minimum - groups).square().sum(-1, keepdim=True)
        best, error = _better(best, Rounded(codes, scale, minimum), error, now)
    assert best is not None
    return _squeezed(best)


def _fitted(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The line of least squares through codes and numbers; its minimum is not negative."""
    count = groups.shape[-1]
    sums, squares = codes.sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True)
    total, products = groups.sum(-1, keepdim=True), (codes * groups).sum(-1, keepdim=True)
    spread = count * squares - sums * sums
    scale = torch.where(spread > 0, (count * products - sums * total) / spread.clamp(min=1e-30), 0)
    minimum = (scale * sums - total) / count
    through_zero = (minimum < 0) | (scale <= 0)
    alone = products / squares.clamp(min=1e-30)
    return torch.where(through_zero, alone.clamp(min=0), scale), minimum.clamp(min=0)


def _better(
    best: Rounded | None, candidate: Rounded, error: Tensor, now: Tensor
) -> tuple[Rounded, Tensor]:
    if best is None:
        return candidate, now
    wins = now < error
    picked = (torch.where(wins, new, old) for new, old in zip(candidate, best, strict=True))
    return Rounded(*picked), torch.where(wins, now, error)


def _squeezed(found: Rounded) -> Rounded:
    return Rounded(found.codes, found.scale[..., 0], found.minimum[..., 0])
