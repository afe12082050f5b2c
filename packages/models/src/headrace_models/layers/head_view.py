"""Rows seen as heads and heads as rows, also where a row is part of a longer one; one row seen as many.

``view`` and ``flatten`` may give the single row of a step of one token another stride than rows have in
other steps; a captured step has one for all.
"""

from __future__ import annotations

from torch import Tensor


def by_heads(x: Tensor, size: int) -> Tensor:
    """x [T, heads * size], rows any distance apart -> [T, heads, size], the same memory."""
    tokens, width = x.shape
    shape, strides = (tokens, width // size, size), (x.stride(0), size, 1)
    return x.as_strided(shape, strides, x.storage_offset())


def in_rows(x: Tensor) -> Tensor:
    """x [T, heads, size], rows any distance apart -> [T, heads * size]; the same memory, if the heads of
    a row are one after the other."""
    tokens, heads, size = x.shape
    if x.stride()[1:] != (size, 1):
        return x.flatten(1)
    return x.as_strided((tokens, heads * size), (x.stride(0), 1), x.storage_offset())


def in_every_row(x: Tensor, tokens: int) -> Tensor:
    """x [H] -> [T, H], all rows the same memory."""
    return x.as_strided((tokens, x.shape[0]), (0, 1), x.storage_offset())
