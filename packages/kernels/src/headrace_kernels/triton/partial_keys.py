"""Attention to a part of the keys: what host functions check, and the log-sum-exp that joins parts."""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError


@triton.jit
def log_sum(top, total):
    """Log-sum-exp of scores with maximum ``top`` and sum of ``exp(s - top)`` ``total``; -inf of none."""
    some = total > 0.0
    return tl.where(
        some, tl.where(some, top, 0.0) + tl.log(tl.where(some, total, 1.0)), float("-inf")
    )


def check_partial(
    key_counts: Tensor | None, lse: Tensor | None, tokens: int, heads: int, op: str
) -> None:
    """Check what a kernel reads and writes by address.

    Args:
        key_counts: [T] int32, or None.
        lse: [T, Hq] float32, or None.

    Raises:
        ConfigError: one is of another shape or dtype, or not contiguous.
    """
    for name, tensor, dtype, shape in (
        ("key_counts", key_counts, torch.int32, (tokens,)),
        ("lse", lse, torch.float32, (tokens, heads)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ConfigError(
                f"{op}: {name} {list(tensor.shape)} of {tensor.dtype}: must be {list(shape)} of {dtype}, "
                "contiguous"
            )
