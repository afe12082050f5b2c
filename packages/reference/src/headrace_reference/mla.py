"""Multi-head latent attention over its paged cache, absorbed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_reference.attention import attend, gather
from headrace_reference.cache import as_bytes, is_of_rows, stored, stored_rows
from headrace_reference.dtypes import unset_like


def mla_cache_write(
    latent: Tensor,
    rope_key: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
) -> None:
    """See :class:`headrace_core.ops.MLACacheWriteOp`."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots, size = slot_mapping[rows], cache.shape[1]
    if is_of_rows(k_scale):
        parts = [stored_rows(x[rows], cache.dtype) for x in (latent, rope_key)]
        at = slots // size, slots % size
        as_bytes(cache)[at] = torch.cat([codes for codes, _ in parts], dim=1)
        k_scale[at] = torch.stack([scale for _, scale in parts], dim=1)
        return
    joined = torch.cat((latent[rows], rope_key[rows]), dim=1)[:, None]
    kept = stored(joined, cache.dtype, k_scale)[:, 0]
    as_bytes(cache)[slots // size, slots % size] = as_bytes(kept)


def fake_mla_cache_write(*args: Any, **options: Any) -> None:
    return None


def mla_attention(
    query: Tensor,
    rope_query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    topk_indices: Tensor | None = None,
    k_scale: Tensor | None = None,
    key_counts: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.MLAAttentionOp`."""
    if key_counts is not None and topk_indices is not None:
        raise ConfigError("mla_attention: key_counts cannot be combined with topk_indices")
    if lse is not None:
        lse.fill_(-torch.inf)
    out = query.new_zeros(query.shape)
    whole, value_dim = torch.cat((query, rope_query), dim=-1), query.shape[-1]
    starts = cu_seqlens_q.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        key = _vectors(cache, block_table[b], seq_len, k_scale, value_dim)
        only = None if topk_indices is None else _is_topk(topk_indices[rows], seq_len)
        out[rows] = attend(
            whole[rows],
            key,
            key[..., :value_dim],
            scale=scale,
            only=only,
            key_counts=None if key_counts is None else key_counts[rows],
            lse=None if lse is None else lse[rows],
        )
    return out


def _vectors(
    cache: Tensor, blocks: Tensor, seq_len: int, k_scale: Tensor | None, latent_dim: int
) -> Tensor:
    """The first seq_len tokens of one request, [L, 1, R + P]."""
    if not is_of_rows(k_scale):
        return gather(cache[:, :, None], blocks, seq_len, k_scale)
    ends = latent_dim // 2 if cache.dtype is torch.uint8 else latent_dim
    parts = (cache[..., :ends], cache[..., ends:])
    found = [
        gather(part[:, :, None], blocks, seq_len, k_scale[..., i : i + 1])
        for i, part in enumerate(parts)
    ]
    return torch.cat(found, dim=-1)


def fake_mla_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(query, *query.shape)


def _is_topk(topk_indices: Tensor, seq_len: int) -> Tensor:
    """[q, k] positions, -1 = none -> [q, L] bool."""
    marks = torch.zeros(
        (topk_indices.shape[0], seq_len + 1), dtype=torch.bool, device=topk_indices.device
    )
    marks.scatter_(1, torch.where(topk_indices < 0, seq_len, topk_indices).long(), True)
    return marks[:, :seq_len]
