"""Decisions that all host functions share, and functions that several kernels share."""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor


def widen(x: Tensor) -> bool:
    """True if a kernel must turn x into float32 before products and sums.

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
    """log(1 + e^x), as max(x, 0) + log(1 + t) for t = e^-|x|. The logarithm is 2 atanh(t / (2 + t)),
    whose series has the digits that 1 + t would lose; it ends at 1e-9 of itself."""
    t = tl.exp(-tl.abs(x))
    z = t / (2.0 + t)
    q = z * z
    p = q * (1.0 / 15.0) + 1.0 / 13.0
    p = p * q + 1.0 / 11.0
    p = p * q + 1.0 / 9.0
    p = p * q + 1.0 / 7.0
    p = p * q + 1.0 / 5.0
    p = p * q + 1.0 / 3.0
    return tl.where(x > 0.0, x, 0.0) + 2.0 * z * (1.0 + p * q)
