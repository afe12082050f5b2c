"""``gaussian_topk``: the part of each row above a quantile of a normal distribution (Gemma 3n)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class GaussianTopKOp(Protocol):
    def __call__(self, x: Tensor, deviations: float) -> Tensor:
        """``max(x - (mean(x) + deviations std(x)), 0)`` of each row, x [T, H], whose values stand for a
        normal distribution's: what is above a quantile, and by how much.

        The standard deviation is that of all H values (divided by H). Source: You et al. 2025,
        arXiv:2506.06644.
        """


GAUSSIAN_TOPK: OptionalOp[GaussianTopKOp] = OptionalOp("gaussian_topk")
