"""What all host functions decide the same way."""

from __future__ import annotations

import os

import torch
import triton
from torch import Tensor


def widen(x: Tensor) -> bool:
    """Whether a kernel must turn x into float32 before products and sums.

    Triton's interpreter multiplies bfloat16 by its raw bits (seen in 3.7: ``tl.dot`` of bfloat16
    is garbage there), so kernels take this as a constant. On a GPU it is always False.
    """
    return x.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"


def padded(size: int, least: int = 1) -> int:
    """Next power of two that is at least ``least``: tiles in Triton have such sizes."""
    return max(least, int(triton.next_power_of_2(size)))


def num_warps(block: int) -> int:
    """Warps for one row of ``block`` values: about 8 to 16 values a thread."""
    return min(16, max(1, block // 512))
