"""``xielu``: xIELU, an activation with a square above 0 and an exponential below (Apertus)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


def xielu(
    x: Tensor, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """See :class:`headrace_core.ops.optional.xielu.XIELUOp`."""
    wide = widened(x)
    below = alpha_n * (torch.expm1(wide.clamp(max=eps)) - wide)
    return (torch.where(wide > 0, alpha_p * wide.square(), below) + beta * wide).to(x.dtype)


def fake_xielu(x: Tensor, alpha_p: float, alpha_n: float, **options: float) -> Tensor:
    return unset_like(x)
