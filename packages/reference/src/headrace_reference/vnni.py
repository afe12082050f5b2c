"""Reads and writes of a VNNI-packed cache by a plain cache's numbers; see :mod:`headrace_core.ops.vnni`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.ops.vnni import GROUP

if TYPE_CHECKING:
    from torch import Tensor


def plain_keys(cache: Tensor) -> Tensor:
    """A copy of VNNI-packed keys as a plain cache [N, S, Hk, D]."""
    num_blocks, heads, groups, halves, _, _ = cache.shape
    return cache.permute(0, 2, 4, 1, 3, 5).reshape(num_blocks, groups * GROUP, heads, 2 * halves)


def plain_values(cache: Tensor) -> Tensor:
    """A copy of VNNI-packed values as a plain cache [N, S, Hk, D]."""
    num_blocks, heads, pairs, dim, _ = cache.shape
    return cache.permute(0, 2, 4, 1, 3).reshape(num_blocks, 2 * pairs, heads, dim)


def write_keys(cache: Tensor, slots: Tensor, keys: Tensor) -> None:
    """keys [T, Hk, D] to slots [T] (``block * S + offset``) of VNNI-packed keys."""
    size = cache.shape[2] * GROUP
    blocks, offsets = slots // size, slots % size
    by_token = cache.permute(0, 2, 4, 1, 3, 5)  # [N, S / 16, 16, Hk, D / 2, 2]
    by_token[blocks, offsets // GROUP, offsets % GROUP] = keys.reshape(*keys.shape[:2], -1, 2)


def write_values(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """values [T, Hk, D] to slots [T] of VNNI-packed values."""
    size = cache.shape[2] * 2
    blocks, offsets = slots // size, slots % size
    by_token = cache.permute(0, 2, 4, 1, 3)  # [N, S / 2, 2, Hk, D]
    by_token[blocks, offsets // 2, offsets % 2] = values
