"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import ONE_BYTE_CACHES, HeadNorm
from headrace_core.ops.vnni import is_vnni_packed
from headrace_reference.dtypes import widened
from headrace_reference.norms import rms_norm
from headrace_reference.rotary import rotary
from headrace_reference.vnni import write_keys, write_values


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See :class:`headrace_core.ops.CacheWriteOp`. key and value may have more rows than slots."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    if is_vnni_packed(key_cache):
        write_keys(key_cache, slots, key[rows])
        write_values(value_cache, slots, value[rows])
        return
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    as_bytes(key_cache)[blocks, offsets] = as_bytes(stored(key[rows], key_cache.dtype, k_scale))
    as_bytes(value_cache)[blocks, offsets] = as_bytes(
        stored(value[rows], value_cache.dtype, v_scale)
    )


def fake_cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    return None


def stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x [T, Hk, D] as a cache of ``dtype`` keeps it: clamped and rounded if that is one byte."""
    if str(dtype).removeprefix("torch.") not in ONE_BYTE_CACHES:
        return x.to(dtype)
    x = widened(x) if scale is None else widened(x) / scale[:, None]
    if dtype is torch.int8:
        return x.nan_to_num(0.0, torch.inf, -torch.inf).round().clamp(-127, 127).to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """A view that torch can index: it cannot index all one-byte floats on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See :class:`headrace_core.ops.RotaryCacheWriteOp`."""
    if head_norm is not None:
        eps, offset = head_norm.eps, head_norm.offset
        query.copy_(rms_norm(query, head_norm.query_weight, eps, offset=offset))
        key.copy_(rms_norm(key, head_norm.key_weight, eps, offset=offset))
    if cos_sin is not None:
        rotary(query, key, positions, cos_sin, interleaved=interleaved)
    cache_write(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def fake_rotary_cache_write(*args: Any, **options: Any) -> None:
    return None
