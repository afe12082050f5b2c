"""Recurrences, one program for each request and its head (or run of its channels), token by token.

The state is held in registers from a request's first token of the step to its last, in float32; how a
request is cut into steps changes nothing. Decoding, where each request has one token, reads and writes the
state and is bound by that; long prompts would gain by chunks, in which sums take another order.

Definitions and sources: :mod:`headrace_core.ops.recurrent`.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import ACTIVATIONS
from headrace_kernels.triton.activations import _activate
from headrace_kernels.triton.launch import dense, num_warps, padded, softplus

_CHANNELS = 64
"""Channels of a convolution's program."""
_VALUES = 32
"""Values of a delta rule's program."""
_STATE_VALUES = 8192
"""Values of the state in a program of Mamba 2's scan: 128 threads keep as many in registers."""


@triton.jit
def tokens_of(cu_ptr, in_ptr, out_ptr, HAS_STATE: tl.constexpr):
    """A program's request: its first token, its end, the blocks of its state (-1: none)."""
    request = tl.program_id(0)
    first, end = tl.load(cu_ptr + request), tl.load(cu_ptr + request + 1)
    before = tl.full((), -1, tl.int64)
    after = tl.full((), -1, tl.int64)
    if HAS_STATE:
        before, after = tl.load(in_ptr + request), tl.load(out_ptr + request)
    return first, end, before, after


@triton.jit
def held_state(state_ptr, block, stride, places, inside):
    """A block's state as a tile, zeros for block -1."""
    held = tl.load(state_ptr + tl.maximum(block, 0) * stride + places, mask=inside, other=0.0)
    return tl.where(block >= 0, held, 0.0)


@triton.jit
def _conv_input(
    x_ptr, state_ptr, token, first, before, row, stride, channel, inside,
    KEPT: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """An input of the convolution: of this step, of the state, or 0."""
    here = token >= first
    x = tl.load(x_ptr + tl.where(here, token, 0) * row + channel, mask=inside, other=0.0)
    x = tl.where(here, x, 0.0)
    if HAS_STATE:
        kept = tl.where(here, 0, token - first + KEPT)
        held = held_state(
            state_ptr, tl.where(here, -1, before), stride, channel * KEPT + kept, inside
        )
        x += held.to(x.dtype)  # one of both is 0
    return x


@triton.jit
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, in_ptr, out_index_ptr, cu_ptr, out_ptr,
    channels, row, weight_channel, weight_tap, stride,
    TAPS: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    kept: tl.constexpr = TAPS - 1
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            x = _conv_input(
                x_ptr, state_ptr, at - kept + tap, first, before, row, stride, channel, inside,
                kept, HAS_STATE,
            )  # fmt: skip
            place = channel * weight_channel + tap * weight_tap
            total += x.to(tl.float32) * tl.load(weight_ptr + place, mask=inside, other=0.0).to(
                tl.float32
            )
        total += bias
        if KIND != "none":
            total = _activate(total, KIND)
        to = out_ptr + at * channels + channel
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_STATE and end > first:
        # Ascending: an entry that is read lies behind those that are written.
        for tap in tl.static_range(kept):
            x = _conv_input(
                x_ptr, state_ptr, zero + end - kept + tap, first, before, row, stride, channel, inside,
                kept, HAS_STATE,
            )  # fmt: skip
            tl.store(state_ptr + after * stride + channel * kept + tap, x, mask=inside)


@triton.jit
def _selective_scan_kernel(
    x_ptr, step_ptr, rate_ptr, key_ptr, query_ptr, skip_ptr, bias_ptr, gate_ptr, state_ptr, in_ptr,
    out_index_ptr, cu_ptr, out_ptr,
    channels, length, x_row, step_row, key_row, query_row, gate_row, rate_channel, rate_n, stride,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_STATE: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    channel, n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside, known = channel < channels, n < length
    tile = inside[:, None] & known[None, :]
    places = channel[:, None] * length + n[None, :]
    rates = tl.load(
        rate_ptr + channel[:, None] * rate_channel + n[None, :] * rate_n, mask=tile, other=0.0
    )
    held = tl.zeros((BLOCK, WIDTH), tl.float32)
    if HAS_STATE:
        held = held_state(state_ptr, before, stride, places, tile)
    skip = tl.load(skip_ptr + channel, mask=inside, other=0.0)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        x = tl.load(x_ptr + at * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        raw = tl.load(step_ptr + at * step_row + channel, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + at * key_row + n, mask=known, other=0.0).to(tl.float32)
        query = tl.load(query_ptr + at * query_row + n, mask=known, other=0.0).to(tl.float32)
        step = softplus(raw + bias)
        held = tl.exp(step[:, None] * rates) * held + (step * x)[:, None] * key[None, :]
        y = tl.sum(held * query[None, :], axis=1) + skip * x
        if HAS_GATE:
            gate = tl.load(gate_ptr + at * gate_row + channel, mask=inside, other=0.0).to(
                tl.float32
            )
            y = y * gate * tl.sigmoid(gate)
        tl.store(out_ptr + at * channels + channel, y.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_STATE and end > first:
        tl.store(state_ptr + after * stride + places, held, mask=tile)


@triton.jit
def _state_space_kernel(
    x_ptr, step_ptr, rate_ptr, key_ptr, query_ptr, skip_ptr, bias_ptr, state_ptr, in_ptr,
    out_index_ptr, cu_ptr, out_ptr,
    heads, size, length, group, x_row, x_head, step_row, key_row, key_group, query_row, query_group,
    stride, low, high,
    HAS_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    head = tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    tile = (p < size)[:, None] & (n < length)[None, :]
    places = (head * size + p)[:, None] * length + n[None, :]
    held = tl.zeros((BLOCK, WIDTH), tl.float32)
    if HAS_STATE:
        held = held_state(state_ptr, before, stride, places, tile)
    rate = tl.load(rate_ptr + head)
    bias = tl.zeros((), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + head)
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        step = tl.full((), 1.0, tl.float32)
        if HAS_STEP:
            raw = tl.load(step_ptr + at * step_row + head).to(tl.float32)
            step = softplus(raw + bias)
            # Not tl.maximum and tl.minimum, which would turn NaN into a limit.
            step = tl.where(step < low, low, step)
            step = tl.where(step > high, high, step)
        x = tl.load(x_ptr + at * x_row + head * x_head + p, mask=p < size, other=0.0).to(tl.float32)
        of_group = head // group
        key = tl.load(key_ptr + at * key_row + of_group * key_group + n, mask=n < length, other=0.0)
        query = tl.load(
            query_ptr + at * query_row + of_group * query_group + n, mask=n < length, other=0.0
        )
        held = tl.exp(step * rate) * held + (step * x)[:, None] * key.to(tl.float32)[None, :]
        y = tl.sum(held * query.to(tl.float32)[None, :], axis=1)
        if HAS_SKIP:
            y += tl.load(skip_ptr + head) * x
        to = out_ptr + (at * heads + head) * size + p
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=p < size)
    if HAS_STATE and end > first:
        tl.store(state_ptr + after * stride + places, held, mask=tile)


@triton.jit
def _log_decay(opened, rate, lower, BOUNDED: tl.constexpr):
    """Log decay of the delta rule: any negative number, or one above a bound."""
    if BOUNDED:
        log = lower * tl.sigmoid(rate * opened)
    else:
        log = -rate * softplus(opened)
    return log


@triton.jit
def _delta_kernel(
    query_ptr, key_ptr, value_ptr, gate_ptr, beta_ptr, rate_ptr, bias_ptr, state_ptr, in_ptr,
    out_index_ptr, cu_ptr, out_ptr,
    heads, size, length, group, query_row, query_head, key_row, key_head, value_row, value_head,
    gate_row, gate_head, beta_row, stride, scale, eps, beta_scale, lower,
    BY_CHANNEL: tl.constexpr, BOUNDED: tl.constexpr, UNIT: tl.constexpr, HAS_STATE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, end, before, after = tokens_of(cu_ptr, in_ptr, out_index_ptr, HAS_STATE)
    head = tl.program_id(1)
    n, p = tl.arange(0, WIDTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    known, inside = n < length, p < size
    tile = known[:, None] & inside[None, :]
    places = (head * length + n)[:, None] * size + p[None, :]
    held = tl.zeros((WIDTH, BLOCK), tl.float32)
    if HAS_STATE:
        held = held_state(state_ptr, before, stride, places, tile)
    rate = tl.exp(tl.load(rate_ptr + head))
    own = head // group
    zero = tl.full((), 0, tl.int64)  # rows times their stride may pass 2^31
    for token in range(first, end):
        at = zero + token
        query = tl.load(query_ptr + at * query_row + own * query_head + n, mask=known, other=0.0)
        key = tl.load(key_ptr + at * key_row + own * key_head + n, mask=known, other=0.0)
        query, key = query.to(tl.float32), key.to(tl.float32)
        if UNIT:
            query = query / tl.sqrt(tl.sum(query * query, axis=0) + eps)
            key = key / tl.sqrt(tl.sum(key * key, axis=0) + eps)
        value = tl.load(value_ptr + at * value_row + head * value_head + p, mask=inside, other=0.0)
        if BY_CHANNEL:
            gate = tl.load(gate_ptr + at * gate_row + head * gate_head + n, mask=known, other=0.0)
            opened = gate.to(tl.float32) + tl.load(
                bias_ptr + head * length + n, mask=known, other=0.0
            )
            held = tl.exp(_log_decay(opened, rate, lower, BOUNDED))[:, None] * held
        else:
            gate = tl.load(gate_ptr + at * gate_row + head * gate_head).to(tl.float32)
            opened = gate + tl.load(bias_ptr + head)
            held = tl.exp(_log_decay(opened, rate, lower, BOUNDED)) * held
        beta = tl.load(beta_ptr + at * beta_row + head).to(tl.float32)
        strength = beta_scale / (1.0 + tl.exp(-beta))
        recalled = tl.sum(held * key[:, None], axis=0)
        held += key[:, None] * (strength * (value.to(tl.float32) - recalled))[None, :]
        y = scale * tl.sum(held * query[:, None], axis=0)
        to = out_ptr + (at * heads + head) * size + p
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_STATE and end > first:
        tl.store(state_ptr + after * stride + places, held, mask=tile)


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, groups, size, row, gate_row, weight_group, eps,
    NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    inside = col < size
    at = group * size + col
    x = tl.load(x_ptr + token * row + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + group * weight_group + col, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if not SIGMOID:
        opened = opened * gate
    if not NORM_FIRST:
        x = x * opened
    y = x / tl.sqrt(tl.sum(x * x, axis=0) / size + eps) * weight
    if NORM_FIRST:
        y = y * opened
    to = out_ptr + token * groups * size + at
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=inside)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    activation: str | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.CausalConvOp`.

    Raises:
        ConfigError: an activation that is not one of :data:`headrace_core.ops.ACTIVATIONS`.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r}: must be one of {', '.join(ACTIVATIONS)}")
    x, (channels, taps) = dense(x), weight.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    num_seqs = cu_seqlens_q.shape[0] - 1
    _causal_conv_kernel[(num_seqs, triton.cdiv(channels, _CHANNELS))](
        x, weight, bias, state, state_in, state_out, cu_seqlens_q, out,
        channels, x.stride(0), *weight.stride(), _stride(state),
        TAPS=taps, KIND=activation or "none", HAS_BIAS=bias is not None, HAS_STATE=state is not None,
        BLOCK=_CHANNELS, num_warps=2,
    )  # fmt: skip
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    dt_bias: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.SelectiveScanOp`."""
    x, dt, b, c = (dense(v) for v in (x, dt, b, c))
    gate = None if gate is None else dense(gate)
    channels, length = a.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = padded(length)
    block = max(1, 1024 // width)
    _selective_scan_kernel[(cu_seqlens_q.shape[0] - 1, triton.cdiv(channels, block))](
        x, dt, a, b, c, d, dt_bias, gate, state, state_in, state_out, cu_seqlens_q, out,
        channels, length, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        0 if gate is None else gate.stride(0), *a.stride(), _stride(state),
        HAS_BIAS=dt_bias is not None, HAS_GATE=gate is not None, HAS_STATE=state is not None,
        BLOCK=block, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def state_space_scan(
    x: Tensor,
    dt: Tensor | None,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """See :class:`headrace_core.ops.StateSpaceScanOp`."""
    x, b, c = (dense(v) for v in (x, b, c))
    dt = None if dt is None else dense(dt)
    (_, heads, size), (groups, length) = x.shape, b.shape[1:]
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = padded(length)
    block = max(1, min(padded(size), _STATE_VALUES // width))
    _state_space_kernel[(cu_seqlens_q.shape[0] - 1, heads, triton.cdiv(size, block))](
        x, dt, a, b, c, d, dt_bias, state, state_in, state_out, cu_seqlens_q, out,
        heads, size, length, heads // groups, *x.stride()[:2], 0 if dt is None else dt.stride(0),
        *b.stride()[:2], *c.stride()[:2], _stride(state), *dt_limits,
        HAS_STEP=dt is not None, HAS_BIAS=dt_bias is not None, HAS_SKIP=d is not None,
        HAS_STATE=state is not None, BLOCK=block, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    l2_norm_eps: float | None = None,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
) -> Tensor:
    """See :class:`headrace_core.ops.DeltaRuleOp`."""
    query, key, value, gate, beta = (dense(v) for v in (query, key, value, gate, beta))
    (_, heads, size), (key_heads, length) = value.shape, key.shape[1:]
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    block = min(_VALUES, padded(size))
    _delta_kernel[(cu_seqlens_q.shape[0] - 1, heads, triton.cdiv(size, block))](
        query, key, value, gate, beta, a_log, dt_bias.contiguous(), state, state_in, state_out,
        cu_seqlens_q, out, heads, size, length, heads // key_heads, *query.stride()[:2],
        *key.stride()[:2], *value.stride()[:2], *gate.stride()[:2], beta.stride(0), _stride(state),
        scale, 0.0 if l2_norm_eps is None else l2_norm_eps, beta_scale,
        0.0 if lower_bound is None else lower_bound, BY_CHANNEL=gate.dim() == 3,
        BOUNDED=lower_bound is not None, UNIT=l2_norm_eps is not None, HAS_STATE=state is not None,
        WIDTH=padded(length), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    norm_first: bool,
    activation: str = "silu",
) -> Tensor:
    """See :class:`headrace_core.ops.GatedRMSNormOp`."""
    x, gate = dense(x), dense(gate)
    rows, width = x.shape
    size = group_size or width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    shared = weight.shape[0] == size != width
    block = padded(size)
    _gated_norm_kernel[(rows, width // size)](
        x, gate, weight.contiguous(), out, width // size, size, x.stride(0), gate.stride(0),
        0 if shared else size, eps, NORM_FIRST=norm_first, SIGMOID=activation == "sigmoid",
        BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return out


def _stride(state: Tensor | None) -> int:
    return 0 if state is None else state.stride(0)
