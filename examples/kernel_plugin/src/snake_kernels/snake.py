"""``snake``, an operation that headrace does not know: ``x + sin(a x)^2 / a``.

Ziyin et al. 2020, arXiv:2006.08195.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headrace_core.ops import OptionalOp


class SnakeOp(Protocol):
    def __call__(self, x: Tensor, frequencies: Tensor) -> Tensor:
        """x [T, H], frequencies [H] float32, not 0 -> [T, H] in x's dtype. In float32, rounded once."""
        ...


SNAKE: OptionalOp[SnakeOp] = OptionalOp("snake")
"""What a family binds: ``context.ops.optional(SNAKE)``."""


def definition(x: Tensor, frequencies: Tensor) -> Tensor:
    """See :class:`SnakeOp`: the formula, in the dtype that x has."""
    return x + torch.sin(frequencies * x).square() / frequencies


def snake(x: Tensor, frequencies: Tensor) -> Tensor:
    """See :class:`SnakeOp`: a kernel, with ``sin^2`` by the cosine of twice the angle."""
    wide = x.float()
    turned = torch.cos(wide * (2 * frequencies)).sub_(1).mul_(-0.5)
    return turned.div_(frequencies).add_(wide).to(x.dtype)
