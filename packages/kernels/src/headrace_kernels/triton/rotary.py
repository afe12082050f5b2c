"""Rotary position embedding, alone or fused with head norm before and cache write after.

For a pair (a, b) of dimensions with angle row ``cos, sin`` of the token's position:
``a' = a cos - b sin``, ``b' = b cos + a sin`` (Su et al. 2021, arXiv:2104.09864). Pair h of R/2 is
(h, h + R/2), or (2h, 2h + 1) if interleaved; dimensions from R on stay as they are.

One program per token and head. The fused kernel has programs for query, key and value heads:

    program h in     [0, Hq)          [Hq, Hq + Hk)         [Hq + Hk, Hq + 2 Hk)
    reads            query head       key head              value head
    does             norm, rotation   norm, rotation        -
    writes           query, in place  key cache             value cache
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_core.ops import HeadNorm
from headrace_kernels.triton.cache_write import cache_write, refuse_one_byte
from headrace_kernels.triton.launch import padded


@triton.jit
def _turn_head(
    from_ptr,
    from_stride,
    to_ptr,
    to_stride,
    weight_ptr,
    angle_ptr,
    eps,
    offset,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    """Norm and rotation of one head of 2 * PAIRS + TAIL values; both ends may be the same memory.

    A thread holds both members of a pair, so working in place needs no barrier.
    """
    dtype = from_ptr.dtype.element_ty
    pair = tl.arange(0, PAIR_BLOCK)
    in_pair = pair < PAIRS
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + PAIRS
    # Angles are float32 and a 16-bit product would lose the low bits of large positions' turns.
    a = tl.load(from_ptr + first * from_stride, mask=in_pair, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + second * from_stride, mask=in_pair, other=0.0).to(tl.float32)
    rest = tl.arange(0, TAIL_BLOCK)
    in_rest = rest < TAIL
    if TAIL > 0:
        rest_at = 2 * PAIRS + rest
        c = tl.load(from_ptr + rest_at * from_stride, mask=in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)
        if TAIL > 0:
            squares += tl.sum(c * c, axis=0)
        scale = 1.0 / tl.sqrt(squares / (2 * PAIRS + TAIL) + eps)
        # Rounded to the activations' dtype as two separate ops would, so that fusing changes
        # nothing in the result.
        wa = tl.load(weight_ptr + first, mask=in_pair, other=0.0).to(tl.float32) + offset
        wb = tl.load(weight_ptr + second, mask=in_pair, other=0.0).to(tl.float32) + offset
        a = (a * scale * wa).to(dtype).to(tl.float32)
        b = (b * scale * wb).to(dtype).to(tl.float32)
        if TAIL > 0:
            wc = tl.load(weight_ptr + 2 * PAIRS + rest, mask=in_rest, other=0.0)
            c = (c * scale * (wc.to(tl.float32) + offset)).to(dtype).to(tl.float32)
    if HAS_ROTARY:
        cos = tl.load(angle_ptr + pair, mask=in_pair, other=0.0).to(tl.float32)
        sin = tl.load(angle_ptr + PAIRS + pair, mask=in_pair, other=0.0).to(tl.float32)
        turned_a = a * cos - b * sin
        b = b * cos + a * sin
        a = turned_a
    # First to the activations' dtype, then to the destination's (a cache may be narrower).
    to_dtype = to_ptr.dtype.element_ty
    tl.store(to_ptr + first * to_stride, a.to(dtype).to(to_dtype), mask=in_pair)
    tl.store(to_ptr + second * to_stride, b.to(dtype).to(to_dtype), mask=in_pair)
    if TAIL > 0:
        tail_at = (2 * PAIRS + rest) * to_stride
        tl.store(to_ptr + tail_at, c.to(dtype).to(to_dtype), mask=in_rest)


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    position_ptr,
    angles_ptr,
    query_strides,
    key_strides,
    angles_stride,
    NUM_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(position_ptr + token).to(tl.int64)
    angle = angles_ptr + position * angles_stride
    if head < NUM_HEADS:
        at = query_ptr + token * query_strides[0] + head * query_strides[1]
        _turn_head(
            at, query_strides[2], at, query_strides[2], at, angle, 0.0, 0.0,
            PAIRS, 0, INTERLEAVED, False, True, PAIR_BLOCK, 1,
        )  # fmt: skip
    else:
        at = key_ptr + token * key_strides[0] + (head - NUM_HEADS) * key_strides[1]
        _turn_head(
            at, key_strides[2], at, key_strides[2], at, angle, 0.0, 0.0,
            PAIRS, 0, INTERLEAVED, False, True, PAIR_BLOCK, 1,
        )  # fmt: skip


@triton.jit
def _rotary_cache_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    position_ptr,
    angles_ptr,
    query_weight_ptr,
    key_weight_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    query_strides,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    angles_stride,
    block_size,
    eps,
    offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    angle = angles_ptr
    if HAS_ROTARY:
        angle += tl.load(position_ptr + token).to(tl.int64) * angles_stride
    if head < NUM_HEADS:
        at = query_ptr + token * query_strides[0] + head * query_strides[1]
        _turn_head(
            at, query_strides[2], at, query_strides[2], query_weight_ptr, angle, eps, offset,
            PAIRS, TAIL, INTERLEAVED, HAS_NORM, HAS_ROTARY, PAIR_BLOCK, TAIL_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if slot >= 0:
            block, page = slot // block_size, slot % block_size
            kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
            if head < NUM_HEADS + NUM_KV_HEADS:
                at = key_ptr + token * key_strides[0] + kv_head * key_strides[1]
                key_to = block * key_cache_strides[0] + page * key_cache_strides[1]
                key_to += kv_head * key_cache_strides[2]
                _turn_head(
                    at, key_strides[2], key_cache_ptr + key_to, key_cache_strides[3],
                    key_weight_ptr, angle, eps, offset,
                    PAIRS, TAIL, INTERLEAVED, HAS_NORM, HAS_ROTARY, PAIR_BLOCK, TAIL_BLOCK,
                )  # fmt: skip
            else:
                dim = tl.arange(0, HEAD_BLOCK)
                inside = dim < HEAD_DIM
                value_at = token * value_strides[0] + kv_head * value_strides[1]
                value_to = block * value_cache_strides[0] + page * value_cache_strides[1]
                value_to += kv_head * value_cache_strides[2]
                value = tl.load(
                    value_ptr + value_at + dim * value_strides[2], mask=inside, other=0.0
                )
                tl.store(
                    value_cache_ptr + value_to + dim * value_cache_strides[3],
                    value.to(value_cache_ptr.dtype.element_ty),
                    mask=inside,
                )


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
) -> None:
    """See :class:`headrace_core.ops.RotaryOp`."""
    num_tokens, num_heads, _ = query.shape
    if not num_tokens:
        return
    pairs = cos_sin.shape[1] // 2
    _rotary_kernel[(num_tokens, num_heads + key.shape[1])](
        query,
        key,
        positions,
        _rows(cos_sin),
        query.stride(),
        key.stride(),
        cos_sin.shape[1],
        NUM_HEADS=num_heads,
        PAIRS=pairs,
        INTERLEAVED=interleaved,
        PAIR_BLOCK=padded(pairs),
        num_warps=1,  # a head is a few hundred values
    )


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
    """See :class:`headrace_core.ops.RotaryCacheWriteOp`. key is left as it was."""
    refuse_one_byte(key, key_cache, k_scale, v_scale)
    if cos_sin is None and head_norm is None:
        cache_write(key, value, key_cache, value_cache, slot_mapping)
        return
    num_tokens = slot_mapping.shape[0]
    if not num_tokens:
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    # Without rotation any pairing will do: the norm has no notion of pairs.
    pairs = head_dim // 2 if cos_sin is None else cos_sin.shape[1] // 2
    tail = head_dim - 2 * pairs
    angles = None if cos_sin is None else _rows(cos_sin)
    _rotary_cache_write_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        query,
        key,
        value,
        positions,
        angles,
        None if head_norm is None else head_norm.query_weight.contiguous(),
        None if head_norm is None else head_norm.key_weight.contiguous(),
        key_cache,
        value_cache,
        slot_mapping,
        query.stride(),
        key.stride(),
        value.stride(),
        key_cache.stride(),
        value_cache.stride(),
        0 if angles is None else angles.stride(0),
        key_cache.shape[1],
        0.0 if head_norm is None else head_norm.eps,
        0.0 if head_norm is None else head_norm.offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=pairs,
        TAIL=tail,
        INTERLEAVED=interleaved,
        HAS_NORM=head_norm is not None,
        HAS_ROTARY=angles is not None,
        PAIR_BLOCK=padded(pairs),
        TAIL_BLOCK=padded(tail),
        HEAD_BLOCK=padded(head_dim),
        num_warps=1,
    )


def _rows(cos_sin: Tensor) -> Tensor:
    """The table with adjacent values in a row; contiguous as models build it."""
    return cos_sin.contiguous()
