"""Rows seen as heads, also where a row is part of a longer one."""

from __future__ import annotations

from torch import Tensor


def by_heads(x: Tensor, size: int) -> Tensor:
    """x [T, heads * size], rows any distance apart -> [T, heads, size], the same memory.

    ``view`` may give the single row of a step of one token another stride than rows have in other
    steps; a captured step has one for all.
    """
    tokens, width = x.shape
    shape, strides = (tokens, width // size, size), (x.stride(0), size, 1)
    return x.as_strided(shape, strides, x.storage_offset())
