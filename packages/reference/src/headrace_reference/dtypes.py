"""Dtypes in which the reference computes, and results without content."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in the dtype of accumulation: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def unset_like(x: Tensor, *shape: int) -> Tensor:
    """An unset tensor of x's dtype and device, and of its shape unless another is given."""
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)
