"""Latent attention (absorbed) over its paged cache, and writing that cache.

For query row (position p of request b, head h) over tokens j <= p, or j < key_counts, with c_j the first R
entries of a cached vector and r_j the other P:

    s_j = scale * (q . c_j + q_rope . r_j)
    o   = sum_j exp(s_j - m) c_j / sum_j exp(s_j - m)

computed tile by tile with a running maximum m, as in ``unified_attention``. A tile of latents is loaded
once and is key and value; its two parts are two products, as R + P is no power of two (512 + 64). A
program serves one token and BLOCK_H heads, which all read the same vectors; programs of decode cut the
context into segments where they would be too few. Source: DeepSeek-AI 2024, arXiv:2405.04434.

Letters: T tokens, B requests, Hq heads, R and P see above, S block size.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.triton.launch import padded, widen
from headrace_kernels.triton.partial_keys import check_partial, log_sum
from headrace_kernels.triton.unified_attention import (
    MIN_DOT,
    NUM_SEGMENTS,
    _num_programs_wanted,
    _reduce_kernel,
    find_seq,
    load_query,
)

_TILE = 16
"""Tokens of a step: with 512 latent entries a wider tile and the query exceed 99 KiB."""
_NUM_WARPS = {64: 8}
"""By heads of a program: with 4 warps 64 of them spill registers (ptxas, capability 8.6 and 9.0)."""


@triton.jit
def _latent_write_kernel(
    latent_ptr,
    rope_ptr,
    cache_ptr,
    slot_ptr,
    latent_stride,
    rope_stride,
    cache_strides,
    block_size,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        dim = tl.arange(0, BLOCK)
        first = dim < LATENT
        second = (dim >= LATENT) & (dim < LATENT + ROPE)
        latent = tl.load(latent_ptr + token * latent_stride + dim, mask=first, other=0.0)
        rope = tl.load(rope_ptr + token * rope_stride + dim - LATENT, mask=second, other=0.0)
        # 64 bits: slot * stride passes 2^31 in every cache that is worth having.
        at = slot // block_size * cache_strides[0] + slot % block_size * cache_strides[1]
        tl.store(
            cache_ptr + at + dim * cache_strides[2],
            tl.where(first, latent, rope),
            mask=dim < LATENT + ROPE,
        )


@triton.jit
def _latent_kernel(
    query_ptr,
    rope_query_ptr,
    cache_ptr,
    table_ptr,
    cu_seqlens_ptr,
    seq_len_ptr,
    count_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    top_ptr,
    total_ptr,
    query_strides,
    rope_strides,
    cache_strides,
    table_stride,
    num_seqs,
    block_size,
    scale,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One token's BLOCK_H heads over one of SEGMENTS pieces of its context. With several,
    part [T, Hq, SEGMENTS, LATENT_BLOCK] float32 and the sums are left for ``_reduce_kernel``."""
    seq = find_seq(cu_seqlens_ptr, tl.program_id(0), num_seqs, 1)
    query_start = tl.load(cu_seqlens_ptr + seq)
    new = tl.program_id(0) - (query_start + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    if new >= query_len:
        return
    token = query_start + new
    seq_len = tl.load(seq_len_ptr + seq)
    end = seq_len - query_len + new + 1  # one past the query's own position
    if HAS_COUNTS:
        end = tl.minimum(tl.load(count_ptr + token), seq_len)

    row = tl.arange(0, BLOCK_H)
    head = tl.program_id(1) * BLOCK_H + row
    row_ok = head < NUM_HEADS
    tokens = token + row * 0
    query = load_query(query_ptr, query_strides, tokens, head, row_ok, LATENT, LATENT_BLOCK, WIDEN)
    rope_query = load_query(
        rope_query_ptr, rope_strides, tokens, head, row_ok, ROPE, ROPE_BLOCK, WIDEN
    )
    dim, rope_dim = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    table = table_ptr + seq.to(tl.int64) * table_stride

    num_tiles = tl.cdiv(tl.maximum(end, 0), TILE)
    tiles_each = tl.cdiv(num_tiles, SEGMENTS)
    first = tl.program_id(2) * tiles_each
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    out = tl.zeros([BLOCK_H, LATENT_BLOCK], tl.float32)
    for tile in range(first, tl.minimum(first + tiles_each, num_tiles)):
        key_at = tile * TILE + tl.arange(0, TILE)
        seen = key_at < end
        block = tl.load(table + key_at // block_size, mask=seen, other=0).to(tl.int64)
        at = block * cache_strides[0] + key_at % block_size * cache_strides[1]
        latent = tl.load(
            cache_ptr + at[:, None] + dim[None, :] * cache_strides[2],
            mask=seen[:, None] & (dim < LATENT)[None, :],
            other=0.0,
        ).to(query.dtype)
        rope = tl.load(
            cache_ptr + at[None, :] + (LATENT + rope_dim)[:, None] * cache_strides[2],
            mask=(rope_dim < ROPE)[:, None] & seen[None, :],
            other=0.0,
        ).to(query.dtype)
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score += tl.dot(rope_query, rope, input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp(score - new_top[:, None])  # the tile's first token is seen: no -inf
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(weight, axis=1)
        out = out * fade[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
        top = new_top

    at = token.to(tl.int64) * NUM_HEADS + head
    if SEGMENTS > 1:
        at = at * SEGMENTS + tl.program_id(2)
        tl.store(part_ptr + at[:, None] * LATENT_BLOCK + dim[None, :], out, mask=row_ok[:, None])
        tl.store(top_ptr + at, top, mask=row_ok)
        tl.store(total_ptr + at, total, mask=row_ok)
    else:
        # A row that saw nothing has total 0 and out 0: it stays 0.
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + at[:, None] * LATENT + dim[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=row_ok[:, None] & (dim < LATENT)[None, :],
        )
        if HAS_LSE:
            tl.store(lse_ptr + at, log_sum(top, total), mask=row_ok)


def mla_cache_write(
    latent: Tensor,
    rope_key: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
) -> None:
    """See :class:`headrace_core.ops.MLACacheWriteOp`; caches of one byte are refused."""
    _check(latent, rope_key, cache)
    latent, rope_key = (x if x.stride(1) == 1 else x.contiguous() for x in (latent, rope_key))
    num_tokens = slot_mapping.shape[0]
    if num_tokens:
        _latent_write_kernel[(num_tokens,)](
            latent, rope_key, cache, slot_mapping, latent.stride(0), rope_key.stride(0),
            cache.stride(), cache.shape[1], LATENT=latent.shape[1], ROPE=rope_key.shape[1],
            BLOCK=padded(cache.shape[2]),
        )  # fmt: skip


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
    batch_invariant: bool = False,
    segments: int | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.MLAAttentionOp`; caches of one byte are refused.

    Args:
        batch_invariant: a row's result does not depend on the other rows: the context is not cut.
        segments: into how many pieces it is, for tests and tuning; None = what fills the device.
    """
    _check(query, rope_query, cache)
    check_partial(key_counts, lse, query.shape[0], query.shape[1], "mla_attention")
    if key_counts is not None and topk_indices is not None:
        raise ConfigError("mla_attention: key_counts cannot be combined with topk_indices")
    if lse is not None:
        lse.fill_(-torch.inf)  # rows of no request, too
    if topk_indices is not None and len(seq_lens):
        cache, block_table, cu_seqlens_q, seq_lens = _single_out(
            topk_indices, cache, block_table, cu_seqlens_q
        )
        max_seqlen_q, max_seqlen_k = 1, topk_indices.shape[1]
    num_tokens, num_heads, latent = query.shape
    # Zeros, not empty: rows that belong to no request (padding of a captured graph) stay 0.
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    num_seqs = seq_lens.shape[0]
    if not num_tokens or not num_seqs:
        return out
    block_h = min(padded(num_heads, MIN_DOT), 64 if query.element_size() == 2 else MIN_DOT)
    tiles = triton.cdiv(num_heads, block_h)
    if segments is None:
        few = num_tokens * tiles < _num_programs_wanted(query.device)
        cut = max_seqlen_q <= 1 and few and max_seqlen_k > NUM_SEGMENTS * _TILE
        segments = NUM_SEGMENTS if cut and not batch_invariant else 1
    latent_block = padded(latent, MIN_DOT)
    top = total = part = out  # of no use in one piece
    if segments > 1:
        shape = (num_tokens, num_heads, segments)
        top = torch.empty(shape, dtype=torch.float32, device=query.device)
        total, part = torch.empty_like(top), top.new_empty((*shape, latent_block))
    # Request b owns the programs from cu_seqlens_q[b] + b on: as many as tokens, and one that idles.
    _latent_kernel[(num_tokens + num_seqs, tiles, segments)](
        query, rope_query, cache, block_table, cu_seqlens_q, seq_lens, key_counts, out, lse, part, top, total,
        query.stride(), rope_query.stride(), cache.stride(), block_table.stride(0), num_seqs,
        cache.shape[1], scale, NUM_HEADS=num_heads, BLOCK_H=block_h, LATENT=latent,
        LATENT_BLOCK=latent_block, ROPE=rope_query.shape[2],
        ROPE_BLOCK=padded(rope_query.shape[2], MIN_DOT), TILE=_TILE, SEGMENTS=segments,
        HAS_COUNTS=key_counts is not None, HAS_LSE=lse is not None, WIDEN=widen(query),
        num_warps=_NUM_WARPS.get(block_h, 4),
    )  # fmt: skip
    if segments > 1:
        _reduce_kernel[(num_seqs, num_heads)](
            part, top, total, cu_seqlens_q, None, out, lse, HAS_SINK=False, HAS_LSE=lse is not None,
            NUM_HEADS=num_heads, HEAD_DIM=latent, D_BLOCK=latent_block, SEGMENTS=segments,
        )  # fmt: skip
    return out


def _single_out(
    topk_indices: Tensor, cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cache, tables, starts and lengths of a batch in which each token is a request whose context is what
    was picked for it: a place for one token is a block."""
    (blocks, size, width), (far, near, _) = cache.shape, cache.stride()
    if far % near:
        raise ConfigError(
            f"triton kernels: picked tokens of a cache whose blocks are {far} apart: must be a multiple "
            f"of {near}, what tokens are"
        )
    places = (blocks - 1) * (far // near) + size
    single = cache.as_strided((places, 1, width), (near, near, 1), cache.storage_offset())
    tokens = torch.arange(topk_indices.shape[0] + 1, dtype=torch.int32, device=topk_indices.device)
    owners = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens[:-1], right=True)
    seen = (topk_indices >= 0) & (owners < block_table.shape[0])[:, None]
    columns = topk_indices.clamp(min=0)
    rows = block_table[owners.clamp(max=block_table.shape[0] - 1)]
    table = rows.gather(1, (columns // size).long()) * (far // near) + columns % size
    return single, table.int(), tokens, seen.sum(dim=1, dtype=torch.int32)


def _check(first: Tensor, second: Tensor, cache: Tensor) -> None:
    if first.shape[-1] + second.shape[-1] != cache.shape[2] or cache.dtype is not first.dtype:
        raise ConfigError(
            f"triton kernels: latent parts of {first.shape[-1]} and {second.shape[-1]} in "
            f"{first.dtype} for a cache {list(cache.shape)} of {cache.dtype}: must be as wide "
            "together, and of one dtype"
        )
