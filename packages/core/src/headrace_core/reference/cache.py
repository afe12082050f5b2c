"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor

from headrace_core.ops import HeadNorm
from headrace_core.reference.norms import rms_norm
from headrace_core.reference.rotary import rotary


def cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See :class:`headrace_core.ops.CacheWriteOp`. key and value may have more rows than slots."""
    block_size = key_cache.shape[1]
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = key[rows].to(key_cache.dtype)
    value_cache[blocks, offsets] = value[rows].to(value_cache.dtype)


def rotary_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    head_norm: HeadNorm | None = None,
) -> None:
    """See :class:`headrace_core.ops.RotaryCacheWriteOp`."""
    if head_norm is not None:
        eps, offset = head_norm.eps, head_norm.offset
        query.copy_(rms_norm(query, head_norm.query_weight, eps, offset=offset))
        key.copy_(rms_norm(key, head_norm.key_weight, eps, offset=offset))
    if cos_sin is not None:
        rotary(query, key, positions, cos_sin, interleaved=interleaved)
    cache_write(key, value, key_cache, value_cache, slot_mapping)
