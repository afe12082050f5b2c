"""The VNNI-packed order of a paged cache: how kernels that multiply pairs of numbers read it.

A plain cache [N, S, Hk, D] keeps a token's D numbers side by side. An instruction that multiplies
pairs (bfloat16 dot products of CPUs) wants other neighbours: for scores, the same two dimensions of
16 keys; for outputs, the same dimension of two keys. Kernels that read a plain cache must shuffle
all of it on every step; a VNNI-packed one is written in that order once:

* keys [N, Hk, S / 16, D / 2, 16, 2]: the element of token s, dimension d is at
  ``[n, h, s // 16, d // 2, s % 16, d % 2]``;
* values [N, Hk, S / 2, D, 2]: at ``[n, h, s // 2, d, s % 2]``.

The bytes are those of a plain cache whose tokens of one head are contiguous, so allocating, copying
and sending blocks do not know the difference. Only the ops of
:data:`headrace_core.ops.CACHE_OPS` do, and they tell
the two apart by the number of dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.attention import KVViews

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16
"""Keys side by side."""


def can_pack_vnni(views: KVViews) -> bool:
    """True if plain views have the dtype (bfloat16), sizes and memory order of a VNNI-packed cache."""
    return all(
        str(cache.dtype) == "torch.bfloat16"
        and cache.shape[1] % GROUP == 0
        and cache.shape[3] % GROUP == 0
        and cache.stride(3) == 1
        and cache.stride(1) == cache.shape[3]
        for cache in views
    )


def vnni_packed(views: KVViews) -> KVViews:
    """The same memory as a VNNI-packed cache; views as :func:`can_pack_vnni` accepts them."""
    keys, values = views
    num_blocks, size, heads, dim = keys.shape
    return KVViews(
        keys.as_strided(
            (num_blocks, heads, size // GROUP, dim // 2, GROUP, 2),
            (keys.stride(0), keys.stride(2), GROUP * dim, 2 * GROUP, 2, 1),
        ),
        values.as_strided(
            (num_blocks, heads, size // 2, dim, 2),
            (values.stride(0), values.stride(2), 2 * dim, 2, 1),
        ),
    )


def is_vnni_packed(key_cache: Tensor) -> bool:
    return key_cache.dim() == 6
