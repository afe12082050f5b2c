"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from headrace_core.ops import ONE_BYTE_CACHES, HeadNorm
from headrace_core.ops.vnni import is_vnni_packed
from headrace_reference.dtypes import widened
from headrace_reference.norms import rms_norm
from headrace_reference.rotary import rotary
from headrace_reference.vnni import write_keys, write_values

LARGEST_CODES = {torch.int8: 127.0, torch.uint8: 7.0}
"""Dtypes of caches with a scale for each row -> the largest number that is stored; uint8 has two a byte."""


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
    _write(key[rows], key_cache, k_scale, slots)
    _write(value[rows], value_cache, v_scale, slots)


def _write(x: Tensor, cache: Tensor, scale: Tensor | None, slots: Tensor) -> None:
    """x [T, Hk, D] to its slots [T] of cache [N, S, Hk, D or D / 2], its scales to theirs if rows have
    their own."""
    at = slots // cache.shape[1], slots % cache.shape[1]
    if is_of_rows(scale):
        as_bytes(cache)[at], scale[at] = stored_rows(x, cache.dtype)
    else:
        as_bytes(cache)[at] = as_bytes(stored(x, cache.dtype, scale))


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


def is_of_rows(scale: Tensor | None) -> TypeGuard[Tensor]:
    """True if these are scales of rows, in the cache: [N, S, Hk]."""
    return scale is not None and scale.dim() == 3


def stored_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows x [..., D] with a scale for each: bytes [..., D], or uint8 [..., D / 2] with two numbers each;
    and the scales [...] float32. See :class:`headrace_core.ops.CacheWriteOp`."""
    largest = LARGEST_CODES[dtype]
    x = widened(x).float()
    scale = x.abs().where(x.isfinite(), x.new_zeros(())).amax(dim=-1) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (x / scale[..., None]).nan_to_num(0.0, torch.inf, -torch.inf).round()
    codes = codes.clamp(-largest, largest).to(torch.int8)
    if dtype is torch.uint8:
        low, high = (codes[..., i::2].view(torch.uint8) & 15 for i in (0, 1))
        codes = low | high << 4
    return codes.view(torch.uint8), scale


def unpacked(codes: Tensor) -> Tensor:
    """Numbers of a cache of :data:`LARGEST_CODES`, without their scales: itself, or
    int8 [..., D] of uint8 [..., D / 2]."""
    if codes.dtype is not torch.uint8:
        return codes
    both = torch.stack((codes << 4, codes & 0xF0), dim=-1).flatten(-2).view(torch.int8)
    return both >> 4


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
