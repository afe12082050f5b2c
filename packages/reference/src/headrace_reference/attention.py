"""Attention, one request at a time: over the paged cache (ATTN-REF of the specification), and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import check_kv_prefix, check_mask
from headrace_core.ops.vnni import is_vnni_packed
from headrace_reference.cache import as_bytes, is_of_rows, unpacked
from headrace_reference.dtypes import unset_like, widened
from headrace_reference.vnni import plain_keys, plain_values


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    attention_chunk: int | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_sqrt: bool = False,
    kv_prefix_key: Tensor | None = None,
    kv_prefix_value: Tensor | None = None,
    logit_scale: Tensor | None = None,
    last_keys: Tensor | None = None,
    key_counts: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.PagedAttentionOp`. The two maxima are not needed here."""
    check_mask(
        causal=causal,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        alibi=alibi_slopes is not None,
        alibi_sqrt=alibi_sqrt,
        logit_scale=logit_scale is not None,
        last_keys=last_keys is not None,
        key_counts=key_counts is not None,
    )
    check_kv_prefix(
        query,
        kv_prefix_key,
        kv_prefix_value,
        num_kv_heads=key_cache.shape[1] if is_vnni_packed(key_cache) else key_cache.shape[2],
        soft_cap=soft_cap,
        alibi=alibi_slopes is not None,
        logit_scale=logit_scale is not None,
    )
    if is_vnni_packed(key_cache):
        key_cache, value_cache = plain_keys(key_cache), plain_values(value_cache)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    starts = cu_seqlens_q.tolist()
    if lse is not None:
        lse.fill_(-torch.inf)
    for b, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[b], starts[b + 1]
        out[start:end] = attend(
            query[start:end],
            gather(key_cache, block_table[b], seq_len, k_scale),
            gather(value_cache, block_table[b], seq_len, v_scale),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            causal=causal,
            attention_chunk=attention_chunk,
            alibi_slopes=alibi_slopes,
            alibi_sqrt=alibi_sqrt,
            kv_prefix_key=kv_prefix_key,
            kv_prefix_value=kv_prefix_value,
            logit_scale=logit_scale,
            last_keys=None if last_keys is None else last_keys[start:end],
            key_counts=None if key_counts is None else key_counts[start:end],
            lse=None if lse is None else lse[start:end],
        )
    return out


def fake_paged_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(query, *query.shape)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    distance_bias: Tensor | None = None,
    key_lens: Tensor | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.VarlenAttentionOp`."""
    _check_rows(query, key, value, max_seqlen, distance_bias)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    starts, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
    seen = lengths if key_lens is None else key_lens.tolist()
    _check_key_lens(seen, lengths)
    for start, length, num_keys in zip(starts, lengths, seen):
        if num_keys > 0:
            rows, keys = slice(start, start + length), slice(start, start + num_keys)
            out[rows] = _attend_both_ways(
                query[rows], key[keys], value[keys], scale, sliding_window, soft_cap, distance_bias
            )
    return out


def fake_varlen_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(query, *query.shape)


def _check_rows(
    query: Tensor, key: Tensor, value: Tensor, max_seqlen: int, distance_bias: Tensor | None
) -> None:
    if key.shape != value.shape or key.shape[0] != query.shape[0]:
        raise ConfigError(
            f"varlen_attention: query {list(query.shape)}, key {list(key.shape)}, value "
            f"{list(value.shape)}: must be [T, Hq, D] and twice [T, Hk, D]"
        )
    if distance_bias is not None and distance_bias.shape[1] < 2 * max_seqlen - 1:
        raise ConfigError(
            f"varlen_attention: distance_bias {list(distance_bias.shape)} is for fewer than "
            f"max_seqlen = {max_seqlen} tokens"
        )


def _check_key_lens(key_lens: list[int], lengths: list[int]) -> None:
    fit = len(key_lens) == len(lengths) and all(0 <= n <= m for n, m in zip(key_lens, lengths))
    if not fit:
        raise ConfigError(
            f"varlen_attention: key_lens {key_lens} for sequences of {lengths} tokens: must be one "
            "number for each, of its tokens at most"
        )


def _attend_both_ways(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float,
    distance_bias: Tensor | None,
) -> Tensor:
    """One sequence, of whose tokens the first K are seen: [L, Hq, D], [K, Hk, D] -> [L, Hq, D]."""
    group = query.shape[1] // key.shape[1]
    wide_query = widened(query)
    wide_key = key.to(wide_query.dtype).repeat_interleave(group, dim=1)
    wide_value = value.to(wide_query.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", wide_query, wide_key) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(query.shape[0], device=query.device)
    distance = at[None, : key.shape[0]] - at[:, None]  # [i, j]: j - i
    if distance_bias is not None:
        middle = (distance_bias.shape[1] - 1) // 2
        scores = scores + distance_bias.to(scores.dtype)[:, middle + distance]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if sliding_window is not None and sliding_window > 0:
        visible = distance.abs() < sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    blind = ~visible.any(dim=1)  # the window holds no key; the weights are NaN
    out = torch.einsum("hqk,khd->qhd", weights, wide_value).masked_fill(blind[:, None, None], 0.0)
    return out.to(query.dtype)


def gather(cache: Tensor, blocks: Tensor, seq_len: int, scale: Tensor | None = None) -> Tensor:
    """The first seq_len tokens of one request: cache [N, S, Hk, D], blocks [M] -> [L, Hk, D].

    Times scale, if given, in the wide dtype: [Hk], or [N, S, Hk], of rows.
    """
    taken = blocks[: -(-seq_len // cache.shape[1])].long()
    rows = as_bytes(cache)[taken].flatten(0, 1)[:seq_len].view(cache.dtype)
    if is_of_rows(scale):
        return widened(unpacked(rows)) * scale[taken].flatten(0, 1)[:seq_len, :, None]
    return rows if scale is None else widened(rows) * scale[:, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    attention_chunk: int | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_sqrt: bool = False,
    kv_prefix_key: Tensor | None = None,
    kv_prefix_value: Tensor | None = None,
    logit_scale: Tensor | None = None,
    last_keys: Tensor | None = None,
    only: Tensor | None = None,
    key_counts: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """One request: the last tokens' queries [q, Hq, D] over all keys, values [L, Hk, D].

    Not ``causal``: the queries may be anybody's, and see everything. ``only`` [q, L] bool: what a query
    sees of what it would. ``key_counts`` [q], and ``lse`` [q, Hq], which is written.
    """
    num_q, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    wide_query = widened(query)
    wide_key = key.to(wide_query.dtype).repeat_interleave(group, dim=1)
    wide_value = value.to(wide_query.dtype).repeat_interleave(group, dim=1)

    scores = torch.einsum("qhd,khd->hqk", wide_query, wide_key) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if logit_scale is not None:
        positions = torch.arange(seq_len - num_q, seq_len, device=query.device).clamp(min=0)
        scores = scores * logit_scale[positions].to(scores.dtype)[:, None]
    if alibi_slopes is not None:
        distance = key_distance(num_q, seq_len, query.device).to(scores.dtype)
        if alibi_sqrt:
            distance = distance.clamp(min=0).sqrt()
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    visible = visibility(num_q, seq_len, sliding_window, query.device, attention_chunk)
    if not causal:
        visible = torch.ones_like(visible)
    if last_keys is not None:
        at = torch.arange(seq_len, device=query.device)
        own = at[seq_len - num_q :, None]
        ahead = (at >= own) & (at <= last_keys[:, None])
        ahead[:, seq_len - num_q :] &= last_keys >= last_keys[:, None]
        visible = visible | ahead
    if key_counts is not None:
        visible = torch.arange(seq_len, device=query.device) < key_counts[:, None]
    if only is not None:
        visible = visible & only
    scores = scores.masked_fill(~visible, -torch.inf)
    if kv_prefix_key is not None and kv_prefix_value is not None:
        always = kv_prefix_key.to(wide_query.dtype).repeat_interleave(group, dim=1)
        first = torch.einsum("qhd,khd->hqk", wide_query, always) * scale
        scores = torch.cat([scores, first], dim=-1)
        more = kv_prefix_value.to(wide_query.dtype).repeat_interleave(group, dim=1)
        wide_value = torch.cat([wide_value, more])
        visible = torch.cat([visible, visible.new_ones((num_q, always.shape[0]))], dim=1)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(num_heads, num_q, 1)
        scores = torch.cat([scores, column], dim=-1)
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, dim=-1).transpose(0, 1))
    weights = torch.softmax(scores, dim=-1)[..., : wide_value.shape[0]]
    unseen = ~visible.any(dim=0)  # may lie in the null block, whose content is arbitrary
    wide_value = wide_value.masked_fill(unseen[:, None, None], 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, wide_value)
    blind = ~visible.any(dim=1)
    return out.masked_fill(blind[:, None, None], 0.0).to(query.dtype)


def visibility(
    num_q: int,
    seq_len: int,
    sliding_window: int | None,
    device: torch.device,
    attention_chunk: int | None = None,
) -> Tensor:
    """[q, L] bool: the new tokens stand at the last num_q of seq_len positions.

    A window of None or at most 0 is none.
    """
    distance = key_distance(num_q, seq_len, device)
    visible = distance >= 0
    if sliding_window is not None and sliding_window > 0:
        visible &= distance < sliding_window
    if attention_chunk is not None:
        at = torch.arange(seq_len, device=device)
        position = torch.arange(seq_len - num_q, seq_len, device=device)
        visible &= (position // attention_chunk)[:, None] == at // attention_chunk
    return visible


def key_distance(num_q: int, seq_len: int, device: torch.device) -> Tensor:
    """[q, L]: position of each new token (negative of those before the first key) less that of each
    key."""
    position = torch.arange(seq_len - num_q, seq_len, device=device)
    return position[:, None] - torch.arange(seq_len, device=device)
