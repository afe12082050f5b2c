"""Attention over the paged cache, one kernel for prefill, decode and mixtures.

For query row (position p of request b, head h) over keys j of the request, visible if ``j <= p``
and, with a window W, ``p - j < W``, or, with chunks of C, ``j // C == p // C``; or all of them, if
not causal; with last keys also ``p < j <= last_keys``, where j's own last key is no less; with counts of
keys ``j < key_counts``, wherever p is:

    s_j = scale * q . k_j;  with a soft cap t: s_j = t * tanh(s_j / t)
    with ALiBi: s_j += slope_h * (j - p)  (Press et al. 2021, arXiv:2108.12409)
    o   = sum_j exp(s_j - m) v_j / (sum_j exp(s_j - m) + exp(sink_h - m))
    lse = m + ln(the same denominator)

computed tile by tile over the keys with a running maximum m (Milakov & Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135). The block table is as in Kwon et al. 2023,
arXiv:2309.06180; splitting the keys for decode as in the "Flash-Decoding" note of Dao et al. 2023.

Letters: T tokens, B requests, Hq query heads, Hk kv heads, G = Hq / Hk, D head size, S block size,
M blocks per table row.

Query blocks. A program serves one kv head and BLOCK_M rows: BLOCK_Q positions times the G query
heads that read this kv head, so that one load of keys serves all of them. Row r is position
``r // G`` of the block and query head ``r % G`` of the group; rows past BLOCK_Q * G idle.
Request b owns the query blocks from ``cu_seqlens_q[b] // BLOCK_Q + b`` on. That is at least as
many as it needs (flooring a running sum loses less than one block per request), and depends on
nothing that only the device knows, so the grid is ``T // BLOCK_Q + B`` without a synchronisation;
programs without work leave at once.

Two kernels share the loop: ``_attention_kernel`` runs over all keys; for decode in small batches,
where that would leave most of the device idle, ``_split_kernel`` runs one program per segment of
the keys and ``_reduce_kernel`` joins the segments' sums.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import check_kv_prefix, check_mask
from headrace_kernels.triton.cache_write import refuse_one_byte
from headrace_kernels.triton.launch import padded, widen
from headrace_kernels.triton.partial_keys import check_partial, log_sum

NUM_SEGMENTS = 16
"""Pieces into which the split kernel cuts a context. Constant, so that graphs can be captured."""

MIN_DOT = 16
"""``tl.dot`` wants at least this much along each axis."""


@triton.jit
def find_seq(cu_seqlens_ptr, query_block, num_seqs, BLOCK_Q: tl.constexpr):
    """Largest b with ``cu_seqlens_q[b] // BLOCK_Q + b <= query_block``."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle
        if first_block <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def tanh(x):
    """By exp(-2|x|), which is at most 1: a quotient of growing exponentials would overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def _visible_range(
    seq_len,
    first_position,
    last_seen,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """[begin, end) of the keys that queries from a position on see, the last of them up to ``last_seen``."""
    begin = first_position * 0
    end = seq_len
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    if CHUNK > 0:
        begin = tl.maximum(first_position, 0) // CHUNK * CHUNK
    if CAUSAL:
        end = tl.minimum(last_seen + 1, seq_len)
    return begin, end


@triton.jit
def load_query(
    query_ptr,
    query_strides,
    token,
    head,
    row_ok,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[BLOCK_M, D_BLOCK], zeros outside."""
    dim = tl.arange(0, D_BLOCK)
    at = token.to(tl.int64) * query_strides[0] + head * query_strides[1]
    query = tl.load(
        query_ptr + at[:, None] + dim[None, :] * query_strides[2],
        mask=row_ok[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:  # see launch.widen
        query = query.to(tl.float32)
    return query


@triton.jit
def _start_sums(sink_ptr, head, row_ok, HAS_SINK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Running maximum and denominator before any key: a sink counts as a key without a value."""
    if HAS_SINK:
        top = tl.load(sink_ptr + head, mask=row_ok, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    return top, total


@triton.jit
def load_slope(slope_ptr, head, row_ok, HAS_SLOPES: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] float32; of no use without slopes."""
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slope_ptr + head, mask=row_ok, other=0.0)
    return slope


@triton.jit
def _attend(
    query,
    position,
    last_seen,
    last_key_ptr,
    context_len,
    slope,
    top,
    total,
    first_tile,
    last_tile,
    key_begin,
    key_end,
    key_ptr,
    value_ptr,
    key_strides,
    value_strides,
    table_ptr,
    kv_head,
    block_size,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    SLOPE_ROOTS: tl.constexpr,
    HAS_LAST_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Run over tiles [first_tile, last_tile) of TILE keys; returns (sum of p v, maximum, sum of p).

    ``last_key_ptr``: of the request's first new token, which stands at ``context_len``.

    Tiles start at multiples of TILE whatever the window or the segment, so the order of a row's
    sums does not depend on the rows that it shares a program with.
    """
    dim = tl.arange(0, D_BLOCK)
    dim_ok = dim < HEAD_DIM
    out = tl.zeros([BLOCK_M, D_BLOCK], tl.float32)
    for tile in range(first_tile, last_tile):
        key_at = tile * TILE + tl.arange(0, TILE)
        # Keys that no row sees are not even read: behind a window the table names the null block,
        # whose content is arbitrary (a NaN times a weight of 0 would still be a NaN).
        key_ok = (key_at >= key_begin) & (key_at < key_end)
        block = tl.load(table_ptr + key_at // block_size, mask=key_ok, other=0).to(tl.int64)
        offset = key_at % block_size
        # 64 bits: block * stride passes 2^31 in any large cache.
        k_row = block * key_strides[0] + offset * key_strides[1] + kv_head * key_strides[2]
        v_row = block * value_strides[0] + offset * value_strides[1] + kv_head * value_strides[2]
        key = tl.load(
            key_ptr + k_row[None, :] + dim[:, None] * key_strides[3],
            mask=dim_ok[:, None] & key_ok[None, :],
            other=0.0,
        ).to(query.dtype)
        value = tl.load(
            value_ptr + v_row[:, None] + dim[None, :] * value_strides[3],
            mask=key_ok[:, None] & dim_ok[None, :],
            other=0.0,
        ).to(query.dtype)

        # "ieee": float32 inputs are multiplied as such, not rounded to 10 bits (TF32).
        score = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_CAP:
            score = soft_cap * tanh(score / soft_cap)
        if HAS_SLOPES:
            away = (key_at[None, :] - position[:, None]).to(tl.float32)
            if SLOPE_ROOTS:
                away = -tl.sqrt(tl.maximum(-away, 0.0))
            score += slope[:, None] * away
        visible = key_ok[None, :]
        if CAUSAL:
            visible = visible & (key_at[None, :] <= last_seen[:, None])
        if HAS_LAST_KEYS:  # of keys behind a row's own, those that see as far
            is_new = key_ok & (key_at >= context_len)
            keys_last = tl.load(last_key_ptr + (key_at - context_len), mask=is_new, other=0)
            is_behind = key_at[None, :] > position[:, None]
            visible = visible & (~is_behind | (keys_last[None, :] >= last_seen[:, None]))
        if WINDOW > 0:
            visible = visible & (position[:, None] - key_at[None, :] < WINDOW)
        if CHUNK > 0:
            visible = visible & ((position // CHUNK)[:, None] == (key_at // CHUNK)[None, :])
        score = tl.where(visible, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet has top = -inf, and -inf - -inf is NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        # The second product takes weights in the values' dtype, sums in float32.
        out = out * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top
    return out, top, total


@triton.jit
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    cu_seqlens_ptr,
    seq_len_ptr,
    sink_ptr,
    slope_ptr,
    prefix_key_ptr,
    prefix_value_ptr,
    last_key_ptr,
    count_ptr,
    out_ptr,
    lse_ptr,
    query_strides,
    key_strides,
    value_strides,
    table_stride,
    prefix_strides,
    prefix_len,
    num_seqs,
    block_size,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    SLOPE_ROOTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_LAST_KEYS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WIDEN: tl.constexpr,
):
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_seq(cu_seqlens_ptr, query_block, num_seqs, BLOCK_Q)
    query_start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_start
    first_new = (query_block - (query_start // BLOCK_Q + seq)) * BLOCK_Q
    if first_new >= query_len:
        return

    row = tl.arange(0, BLOCK_M)
    new = first_new + row // GROUP
    row_ok = (row < BLOCK_Q * GROUP) & (new < query_len)
    head = kv_head * GROUP + row % GROUP
    seq_len = tl.load(seq_len_ptr + seq)
    context_len = seq_len - query_len
    last_new = tl.minimum(first_new + BLOCK_Q, query_len) - 1
    last_seen, most_seen = context_len + new, context_len + last_new
    if HAS_LAST_KEYS:
        last_key_ptr += query_start
        last_seen = tl.load(last_key_ptr + new, mask=row_ok, other=0)
        most_seen = tl.maximum(tl.max(last_seen, axis=0), most_seen)
        last_seen = tl.maximum(last_seen, context_len + new)
    if HAS_COUNTS:
        last_seen = tl.load(count_ptr + query_start + new, mask=row_ok, other=0) - 1
        most_seen = tl.max(last_seen, axis=0)
    begin, end = _visible_range(seq_len, context_len + first_new, most_seen, WINDOW, CHUNK, CAUSAL)

    query = load_query(
        query_ptr, query_strides, query_start + new, head, row_ok, HEAD_DIM, D_BLOCK, WIDEN
    )
    slope = load_slope(slope_ptr, head, row_ok, HAS_SLOPES, BLOCK_M)
    top, total = _start_sums(sink_ptr, head, row_ok, HAS_SINK, BLOCK_M)
    first, first_top = tl.zeros([BLOCK_M, D_BLOCK], tl.float32), top
    if HAS_PREFIX:  # one block, which every row sees all of
        first, first_top, total = _attend(
            query, context_len + new, last_seen, last_key_ptr, context_len, slope, top, total,
            0, tl.cdiv(prefix_len, TILE), 0, prefix_len,
            prefix_key_ptr, prefix_value_ptr, prefix_strides, prefix_strides,
            table_ptr, kv_head, prefix_len, scale, soft_cap,
            0, 0, False, False, False, False, False, HEAD_DIM, D_BLOCK, TILE, BLOCK_M, WIDEN,
        )  # fmt: skip
        top = first_top
    out, top, total = _attend(
        query, context_len + new, last_seen, last_key_ptr, context_len, slope, top, total,
        begin // TILE, tl.cdiv(end, TILE), begin, end,
        key_ptr, value_ptr, key_strides, value_strides,
        table_ptr + seq.to(tl.int64) * table_stride, kv_head, block_size, scale, soft_cap,
        WINDOW, CHUNK, CAUSAL, HAS_CAP, HAS_SLOPES, SLOPE_ROOTS, HAS_LAST_KEYS, HEAD_DIM, D_BLOCK, TILE,
        BLOCK_M, WIDEN,
    )  # fmt: skip
    if HAS_PREFIX:
        out += first * tl.exp(first_top - top)[:, None]
    # A row that saw nothing has total 0 and out 0: it stays 0.
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    dim = tl.arange(0, D_BLOCK)
    at = ((query_start + new).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + at[:, None] + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (dim < HEAD_DIM)[None, :],
    )
    if HAS_LSE:
        at = (query_start + new).to(tl.int64) * NUM_HEADS + head
        tl.store(lse_ptr + at, log_sum(top, total), mask=row_ok)


@triton.jit
def _split_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    cu_seqlens_ptr,
    seq_len_ptr,
    sink_ptr,
    slope_ptr,
    count_ptr,
    part_ptr,
    top_ptr,
    total_ptr,
    query_strides,
    key_strides,
    value_strides,
    table_stride,
    block_size,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    SLOPE_ROOTS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Decode only (at most one new token a request). part [T, Hq, SEGMENTS, D_BLOCK] float32."""
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    token = tl.load(cu_seqlens_ptr + seq)
    if tl.load(cu_seqlens_ptr + seq + 1) == token:  # no new token: padding of a captured graph
        return
    position = tl.load(seq_len_ptr + seq) - 1
    last_seen = position
    if HAS_COUNTS:
        last_seen = tl.load(count_ptr + token) - 1
    begin, end = _visible_range(position + 1, position, last_seen, WINDOW, CHUNK, CAUSAL)
    first_tile = begin // TILE
    tiles_each = tl.cdiv(tl.cdiv(end, TILE) - first_tile, SEGMENTS)
    first = first_tile + segment * tiles_each
    last = tl.minimum(first + tiles_each, tl.cdiv(end, TILE))

    row = tl.arange(0, BLOCK_M)
    row_ok = row < GROUP
    head = kv_head * GROUP + row
    tokens = token + row * 0
    query = load_query(query_ptr, query_strides, tokens, head, row_ok, HEAD_DIM, D_BLOCK, WIDEN)
    slope = load_slope(slope_ptr, head, row_ok, HAS_SLOPES, BLOCK_M)
    # The sink enters once, at the end of the reduction; here a segment without keys is (0, -inf, 0).
    top, total = _start_sums(sink_ptr, head, row_ok, False, BLOCK_M)
    out, top, total = _attend(
        query, position + row * 0, last_seen + row * 0, None, 0, slope, top, total, first, last, begin, end,
        key_ptr, value_ptr, key_strides, value_strides,
        table_ptr + seq.to(tl.int64) * table_stride, kv_head, block_size, scale, soft_cap,
        WINDOW, CHUNK, CAUSAL, HAS_CAP, HAS_SLOPES, SLOPE_ROOTS, False, HEAD_DIM, D_BLOCK, TILE, BLOCK_M,
        WIDEN,
    )  # fmt: skip
    at = (tokens.to(tl.int64) * NUM_HEADS + head) * SEGMENTS + segment
    dim = tl.arange(0, D_BLOCK)
    tl.store(part_ptr + at[:, None] * D_BLOCK + dim[None, :], out, mask=row_ok[:, None])
    tl.store(top_ptr + at, top, mask=row_ok)
    tl.store(total_ptr + at, total, mask=row_ok)


@triton.jit
def _reduce_kernel(
    part_ptr,
    top_ptr,
    total_ptr,
    cu_seqlens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    HAS_SINK: tl.constexpr,
    HAS_LSE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One program a token and head: joins the segments, each scaled to the common maximum."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    if tl.load(cu_seqlens_ptr + seq + 1) == token:
        return
    segment = tl.arange(0, SEGMENTS)
    dim = tl.arange(0, D_BLOCK)
    at = (token * NUM_HEADS + head) * SEGMENTS + segment
    tops = tl.load(top_ptr + at)
    top = tl.max(tops, axis=0)
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(tops - shift)
    total = tl.sum(tl.load(total_ptr + at) * share, axis=0)
    if HAS_SINK:
        total += tl.exp(sink - shift)
    parts = tl.load(part_ptr + at[:, None] * D_BLOCK + dim[None, :])
    out = tl.sum(parts * share[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim,
        out.to(out_ptr.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
    if HAS_LSE:
        tl.store(lse_ptr + token * NUM_HEADS + head, log_sum(shift, total))


# Both from compiling for capability 9.0: registers, spills and shared memory as ptxas reports them.
_WIDEST_TILE_OF_32 = 1024
"""Bytes of a padded head up to which 32 keys and values fit beside the query."""
_WIDEST_HEAD_OF_64_ROWS = {2: 256, 4: 64}
"""Item size -> padded head size up to which 64 query rows do not spill."""


class Plan(NamedTuple):
    """Tile shapes of one call."""

    block_m: int
    """Rows of a query block."""
    block_q: int
    """Positions of a query block."""
    tile: int
    """Keys per step of the loop."""
    split: bool
    """True if the keys are cut into :data:`NUM_SEGMENTS`."""


def make_plan(
    *,
    group: int,
    head_dim: int,
    item_bytes: int,
    num_seqs: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sliding_window: int | None,
    num_programs_wanted: int,
    batch_invariant: bool = False,
) -> Plan:
    """Choose tile shapes.

    Args:
        group: query heads per kv head.
        head_dim: D.
        item_bytes: bytes of one value of the query and the cache.
        num_programs_wanted: how many programs fill the device; fewer make splitting worth it.
        batch_invariant: one shape for every call of a layer, and no splitting.

    The tile is 32 for prefill; for decode 16. Layers that look like
    Gemma 3's local ones (window 1024, head size 128 or 256) take 32 throughout (ATTN-UNIFIED).
    Heads so wide that those shapes would need more than 99 KiB of shared memory (the limit of
    compute capability 8.6 and 8.9) or spill registers get fewer rows and keys.
    """
    decode = max_seqlen_q <= 1
    gemma3 = sliding_window == 1024 and head_dim in (128, 256)
    d_block = padded(head_dim, least=MIN_DOT)
    small_tile = decode and not gemma3 and not batch_invariant
    tile = 16 if small_tile or d_block * item_bytes > _WIDEST_TILE_OF_32 else 32
    narrow = decode or batch_invariant or d_block > _WIDEST_HEAD_OF_64_ROWS.get(item_bytes, 256)
    block_m = padded(group, least=MIN_DOT if narrow else 64)
    few_programs = num_seqs * num_kv_heads < num_programs_wanted
    enough_keys = max_seqlen_k > NUM_SEGMENTS * tile
    split = decode and few_programs and enough_keys and not batch_invariant
    return Plan(block_m, block_m // group, tile, split)


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
    batch_invariant: bool = False,
    plan: Plan | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.PagedAttentionOp`.

    Args:
        batch_invariant: a row's result does not depend on the other rows (no splitting, one tile
            shape); bound by the provider under HEADRACE_BATCH_INVARIANT=1.
        plan: tile shapes, for tests and tuning; None = :func:`make_plan`.
    """
    refuse_one_byte(query, key_cache, k_scale, v_scale)
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
    if logit_scale is not None:
        raise ConfigError("triton kernels: paged_attention takes no logit_scale")
    check_kv_prefix(
        query,
        kv_prefix_key,
        kv_prefix_value,
        num_kv_heads=key_cache.shape[2],
        soft_cap=soft_cap,
        alibi=alibi_slopes is not None,
        logit_scale=logit_scale is not None,
    )
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    check_partial(key_counts, lse, num_tokens, num_heads, "paged_attention")
    if lse is not None:
        lse.fill_(-torch.inf)  # rows of no request, too
    # Zeros, not empty: rows that belong to no request (padding of a captured graph) stay 0.
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    num_seqs = seq_lens.shape[0]
    if not num_tokens or not num_seqs:
        return out
    if plan is None:
        plan = make_plan(
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            item_bytes=query.element_size(),
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            sliding_window=sliding_window,
            num_programs_wanted=_num_programs_wanted(query.device),
            # neither prefix nor last keys are split
            batch_invariant=batch_invariant or kv_prefix_key is not None or last_keys is not None,
        )
    constants = {
        "WINDOW": sliding_window or 0,
        "CHUNK": attention_chunk or 0,
        "CAUSAL": causal,
        "HAS_CAP": soft_cap > 0,
        "HAS_SINK": sinks is not None,
        "HAS_SLOPES": alibi_slopes is not None,
        "SLOPE_ROOTS": alibi_sqrt,
        "HAS_COUNTS": key_counts is not None,
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "D_BLOCK": padded(head_dim, least=MIN_DOT),
        "TILE": plan.tile,
        "BLOCK_M": plan.block_m,
        "WIDEN": widen(query),
    }
    sources = (
        query, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens, sinks, alibi_slopes,
    )  # fmt: skip
    strides = (query.stride(), key_cache.stride(), value_cache.stride(), block_table.stride(0))
    numbers = (key_cache.shape[1], scale, soft_cap)
    if plan.split:
        _run_split(sources, key_counts, strides, numbers, constants, out, lse)
    else:
        grid = (num_tokens // plan.block_q + num_seqs, num_kv_heads)
        prefix = [None if x is None else x.contiguous() for x in (kv_prefix_key, kv_prefix_value)]
        size = 0 if kv_prefix_key is None else kv_prefix_key.shape[0]
        _attention_kernel[grid](
            *sources,
            *prefix,
            last_keys,
            key_counts,
            out,
            lse,
            *strides,
            (0, num_kv_heads * head_dim, head_dim, 1),
            size,
            num_seqs,
            *numbers,
            HAS_PREFIX=size > 0,
            HAS_LAST_KEYS=last_keys is not None,
            HAS_LSE=lse is not None,
            BLOCK_Q=plan.block_q,
            **constants,
        )
    return out


def _run_split(
    sources: tuple[Tensor | None, ...],
    key_counts: Tensor | None,
    strides: tuple[object, ...],
    numbers: tuple[float, ...],
    constants: dict[str, int],
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """The two launches of a split decode."""
    num_tokens, num_heads, head_dim = out.shape
    cu_seqlens_q, seq_lens, sinks = sources[4:7]
    assert seq_lens is not None
    num_seqs = seq_lens.shape[0]
    d_block = constants["D_BLOCK"]
    top = torch.empty((num_tokens, num_heads, NUM_SEGMENTS), dtype=torch.float32, device=out.device)
    total = torch.empty_like(top)
    part = top.new_empty((*top.shape, d_block))
    grid = (num_seqs, num_heads // constants["GROUP"], NUM_SEGMENTS)
    _split_kernel[grid](
        *sources,
        key_counts,
        part,
        top,
        total,
        *strides,
        *numbers,
        SEGMENTS=NUM_SEGMENTS,
        **constants,
    )
    _reduce_kernel[(num_seqs, num_heads)](
        part,
        top,
        total,
        cu_seqlens_q,
        sinks,
        out,
        lse,
        HAS_SINK=constants["HAS_SINK"],
        HAS_LSE=lse is not None,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        D_BLOCK=d_block,
        SEGMENTS=NUM_SEGMENTS,
    )


def _num_programs_wanted(device: torch.device) -> int:
    """Two programs per multiprocessor keep it busy while one waits for memory."""
    if device.type != "cuda":
        return 2 * (os.cpu_count() or 1)
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
