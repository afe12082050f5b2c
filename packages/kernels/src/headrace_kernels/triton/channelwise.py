"""Recurrences of single channels, one program for each request and run of channels, token by token.

Definitions and sources: :mod:`headrace_core.ops.recurrent`.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton.launch import dense, softplus
from headrace_kernels.triton.recurrent import held_state, tokens_of

_CHANNELS = 128
"""Channels of a program."""
_BEGIN = tl.constexpr(-1e38)
"""The logarithm that a request begins with, see :class:`headrace_core.ops.optional.wkv.WKVOp`."""


@triton.jit
def _rg_lru_kernel(
    x_ptr, input_ptr, gate_ptr, decay_ptr, input_bias_ptr, decay_bias_ptr, state_ptr, in_ptr,
    out_index_ptr, cu_ptr, out_ptr, channels, x_row, input_row, gate_row, stride,
    HAS_STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    held = tl.zeros((BLOCK,), tl.float32)
    if HAS_STATE:
        held = held_state(state_ptr, before, stride, channel, inside)
    rate = -8.0 * softplus(tl.load(decay_ptr + channel, mask=inside, other=0.0))
    input_bias = tl.load(input_bias_ptr + channel, mask=inside, other=0.0)
    decay_bias = tl.load(decay_bias_ptr + channel, mask=inside, other=0.0)
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        x = tl.load(x_ptr + at * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        opened = tl.load(input_ptr + at * input_row + channel, mask=inside, other=0.0)
        gate = tl.load(gate_ptr + at * gate_row + channel, mask=inside, other=0.0)
        taken = x * tl.sigmoid(opened.to(tl.float32) + input_bias)
        log_decay = rate * tl.sigmoid(gate.to(tl.float32) + decay_bias)
        share = tl.sqrt(1.0 - tl.exp(2.0 * log_decay))
        begins = (before < 0) & (token == first)
        held = tl.where(begins, taken, tl.exp(log_decay) * held + share * taken)
        tl.store(out_ptr + at * channels + channel, held.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_STATE and end > first:
        tl.store(state_ptr + after * stride + channel, held, mask=inside)


@triton.jit
def _wkv_kernel(
    key_ptr, value_ptr, decay_ptr, first_ptr, state_ptr, in_ptr, out_index_ptr, cu_ptr, out_ptr,
    channels, key_row, value_row, stride, HAS_STATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    total = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    log = tl.full((BLOCK,), _BEGIN, tl.float32)
    if HAS_STATE:
        total = held_state(state_ptr, before, stride, channel, inside)
        weight = held_state(state_ptr, before, stride, channels + channel, inside)
        log = tl.where(
            before >= 0, held_state(state_ptr, before, stride, 2 * channels + channel, inside), log
        )
    decay = tl.load(decay_ptr + channel, mask=inside, other=0.0)
    bonus = tl.load(first_ptr + channel, mask=inside, other=0.0)
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        key = tl.load(key_ptr + at * key_row + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + at * value_row + channel, mask=inside, other=0.0)
        value = value.to(tl.float32)
        own = bonus + key
        most = tl.maximum(log, own)
        old, new = tl.exp(log - most), tl.exp(own - most)
        y = (old * total + new * value) / (old * weight + new)
        tl.store(out_ptr + at * channels + channel, y.to(out_ptr.dtype.element_ty), mask=inside)
        most = tl.maximum(log + decay, key)
        old, new = tl.exp(log + decay - most), tl.exp(key - most)
        total, weight, log = old * total + new * value, old * weight + new, most
    if HAS_STATE and end > first:
        to = state_ptr + after * stride + channel
        tl.store(to, total, mask=inside)
        tl.store(to + channels, weight, mask=inside)
        tl.store(to + 2 * channels, log, mask=inside)


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    decay_gate: Tensor,
    decay: Tensor,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    input_bias: Tensor,
    decay_bias: Tensor,
) -> Tensor:
    """See :class:`headrace_core.ops.optional.rg_lru.RGLRUOp`."""
    x, input_gate, decay_gate = (dense(v) for v in (x, input_gate, decay_gate))
    channels = x.shape[1]
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    _rg_lru_kernel[(cu_seqlens_q.shape[0] - 1, triton.cdiv(channels, _CHANNELS))](
        x, input_gate, decay_gate, decay, input_bias, decay_bias, state, state_in, state_out,
        cu_seqlens_q, out, channels, x.stride(0), input_gate.stride(0), decay_gate.stride(0),
        0 if state is None else state.stride(0), HAS_STATE=state is not None, BLOCK=_CHANNELS,
        num_warps=2,
    )  # fmt: skip
    return out


def wkv(
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    first: Tensor,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
) -> Tensor:
    """See :class:`headrace_core.ops.optional.wkv.WKVOp`."""
    key, value = dense(key), dense(value)
    channels = value.shape[1]
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    _wkv_kernel[(cu_seqlens_q.shape[0] - 1, triton.cdiv(channels, _CHANNELS))](
        key, value, decay, first, state, state_in, state_out, cu_seqlens_q, out, channels,
        key.stride(0), value.stride(0), 0 if state is None else state.stride(0),
        HAS_STATE=state is not None, BLOCK=_CHANNELS, num_warps=2,
    )  # fmt: skip
    return out
