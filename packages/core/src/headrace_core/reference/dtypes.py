"""In which dtype the reference computes."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """x in the dtype of accumulation: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
