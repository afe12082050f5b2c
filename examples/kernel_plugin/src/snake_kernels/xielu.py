"""``xielu``: :class:`headrace_core.ops.optional.xielu.XIELUOp`."""

from __future__ import annotations

import torch
from torch import Tensor


def xielu(
    x: Tensor, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """Both sides of 0 at once, in float32: one of the two clamped values is 0, and its side with it."""
    wide = x.float()
    above, below = wide.clamp(min=0), wide.clamp(max=0)
    curve = torch.expm1(below.clamp(max=eps)) - below
    curve = curve.masked_fill_(wide > 0, 0).mul_(alpha_n)
    return curve.addcmul_(above, above, value=alpha_p).add_(wide, alpha=beta).to(x.dtype)
