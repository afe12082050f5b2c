"""What all host functions decide the same way, and what several kernels compute."""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
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


def dense(x: Tensor) -> Tensor:
    """x with adjacent values along the last axis; rows may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def softplus(x):
    """log(1 + e^x), which is x where e^x would overflow; x float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
