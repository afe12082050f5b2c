"""Attention in both directions within each of several sequences, without a cache.

For query row (token i of a sequence, head h) over its tokens j, visible if ``|i - j| < W`` where there
is a window W:

    s_j = scale * q . k_j;  with a soft cap t: s_j = t * tanh(s_j / t);  s_j += bias_h(j - i)
    o   = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m)

tile by tile over the keys with a running maximum m. Query blocks, rows and how a program finds its
sequence are those of :mod:`~headrace_kernels.triton.unified_attention`; keys and values are read
where the projection left them. Tile shapes depend on the layer alone, and tiles start at multiples of
their size within a sequence: a sequence's result does not depend on the others.

With ``key_lens`` a sequence's keys end before its tokens do.

Letters: T tokens, B sequences, Hq query heads, Hk kv heads, D head size, P reach of the bias.
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
from headrace_kernels.triton.unified_attention import MIN_DOT, find_seq, load_query, tanh

_TILE = 32
_WIDE_HEAD_BYTES = 256
"""Bytes of a padded head above which a block has the fewest rows that ``tl.dot`` takes."""


@triton.jit
def _varlen_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cu_seqlens_ptr,
    key_lens_ptr,
    bias_ptr,
    out_ptr,
    query_strides,
    key_strides,
    value_strides,
    num_seqs,
    scale,
    soft_cap,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    HAS_KEY_LENS: tl.constexpr,
    HAS_CAP: tl.constexpr,
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
    start = tl.load(cu_seqlens_ptr + seq)
    length = tl.load(cu_seqlens_ptr + seq + 1) - start
    first = (query_block - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first >= length:
        return

    row = tl.arange(0, BLOCK_M)
    at = first + row // GROUP
    row_ok = (row < BLOCK_Q * GROUP) & (at < length)
    head = kv_head * GROUP + row % GROUP
    query = load_query(query_ptr, query_strides, start + at, head, row_ok, HEAD_DIM, D_BLOCK, WIDEN)

    begin = first * 0
    end = length
    if HAS_KEY_LENS:
        end = tl.minimum(tl.load(key_lens_ptr + seq), length)
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0)
        end = tl.minimum(first + BLOCK_Q - 1 + WINDOW, end)
    dim = tl.arange(0, D_BLOCK)
    dim_ok = dim < HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, D_BLOCK], tl.float32)
    for tile in range(begin // TILE, tl.cdiv(end, TILE)):
        key_at = tile * TILE + tl.arange(0, TILE)
        key_ok = (key_at >= begin) & (key_at < end)
        token = (start + key_at).to(tl.int64)
        k_row = token * key_strides[0] + kv_head * key_strides[1]
        v_row = token * value_strides[0] + kv_head * value_strides[1]
        key = tl.load(
            key_ptr + k_row[None, :] + dim[:, None] * key_strides[2],
            mask=dim_ok[:, None] & key_ok[None, :],
            other=0.0,
        ).to(query.dtype)
        value = tl.load(
            value_ptr + v_row[:, None] + dim[None, :] * value_strides[2],
            mask=key_ok[:, None] & dim_ok[None, :],
            other=0.0,
        ).to(query.dtype)

        score = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_CAP:
            score = soft_cap * tanh(score / soft_cap)
        distance = key_at[None, :] - at[:, None]
        visible = key_ok[None, :] & row_ok[:, None]
        if WINDOW > 0:
            visible = visible & (tl.abs(distance) < WINDOW)
        if REACH > 0:
            place = head[:, None] * (2 * REACH - 1) + REACH - 1 + distance
            score += tl.load(bias_ptr + place, mask=visible, other=0.0)
        score = tl.where(visible, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet has top = -inf, and -inf - -inf is NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        out = out * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    to = ((start + at).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + to[:, None] + dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok[None, :],
    )


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
    _check_shapes(query, key, value, max_seqlen, distance_bias)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_seqs = key.shape[1], cu_seqlens.shape[0] - 1
    if key_lens is not None and key_lens.shape != (num_seqs,):
        raise ConfigError(
            f"varlen_attention: key_lens {list(key_lens.shape)}: must be [{num_seqs}], for as many "
            "sequences"
        )
    # Zeros, not empty: rows past the last sequence stay 0.
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if not num_tokens or not num_seqs:
        return out
    group, d_block = num_heads // num_kv_heads, padded(head_dim, least=MIN_DOT)
    narrow = d_block * query.element_size() > _WIDE_HEAD_BYTES
    block_m = padded(group, least=MIN_DOT if narrow else 64)
    block_q = block_m // group
    _varlen_kernel[(num_tokens // block_q + num_seqs, num_kv_heads)](
        query,
        key,
        value,
        cu_seqlens,
        key_lens,
        None if distance_bias is None else distance_bias.contiguous(),
        out,
        query.stride(),
        key.stride(),
        value.stride(),
        num_seqs,
        scale,
        soft_cap,
        WINDOW=max(0, sliding_window or 0),
        REACH=0 if distance_bias is None else (distance_bias.shape[1] + 1) // 2,
        HAS_KEY_LENS=key_lens is not None,
        HAS_CAP=soft_cap > 0,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        D_BLOCK=d_block,
        TILE=_TILE,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        WIDEN=widen(query),
    )
    return out


def _check_shapes(
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
