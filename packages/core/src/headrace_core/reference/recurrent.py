"""Recurrent layers, one request after the other and token by token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.reference.activations import activation as activate
from headrace_core.reference.dtypes import widened

WKV_BEGIN = -1e38
"""The logarithm that a request begins with, see :class:`headrace_core.ops.WKVOp`."""


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
    """See :class:`headrace_core.ops.CausalConvOp`."""
    channels, taps = weight.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    wide_weight = widened(weight)
    for b, rows in requests(cu_seqlens_q):
        before = started(state, state_in, b, (channels, taps - 1), x)
        inputs = torch.cat((before.T, x[rows]))  # [K - 1 + L, C]
        keep(state, state_out, b, inputs[inputs.shape[0] - (taps - 1) :].T)
        windows = widened(inputs).unfold(0, taps, 1)  # [L, C, K]
        total = (windows * wide_weight).sum(-1)
        if bias is not None:
            total = total + bias.to(total.dtype)
        if activation is not None:
            total = activate(total, activation)
        out[rows] = total.to(x.dtype)
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
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    wide = widened(x)
    steps = widened(dt) if dt_bias is None else widened(dt) + dt_bias.to(wide.dtype)
    steps = F.softplus(steps)
    rates, keys, queries = a.to(wide.dtype), b.to(wide.dtype), c.to(wide.dtype)
    for r, rows in requests(cu_seqlens_q):
        h = started(state, state_in, r, tuple(a.shape), wide)
        for t in range(rows.start, rows.stop):
            s = steps[t, :, None]  # [C, 1]
            h = torch.exp(s * rates) * h + s * keys[t] * wide[t, :, None]
            y = (h * queries[t]).sum(-1) + d.to(wide.dtype) * wide[t]
            if gate is not None:
                y = y * F.silu(gate[t].to(wide.dtype))
            out[t] = y.to(x.dtype)
        keep(state, state_out, r, h)
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
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    wide = widened(x)
    heads, size = x.shape[1:]
    group = heads // b.shape[1]
    keys = b.to(wide.dtype).repeat_interleave(group, dim=1)  # [T, H, N]
    queries = c.to(wide.dtype).repeat_interleave(group, dim=1)
    steps = _steps(dt, dt_bias, dt_limits, wide)  # [T, H]
    for r, rows in requests(cu_seqlens_q):
        held = started(state, state_in, r, (heads, size, b.shape[2]), wide)
        for t in range(rows.start, rows.stop):
            decay = torch.exp(steps[t] * a.to(wide.dtype))[:, None, None]
            taken = steps[t][:, None] * wide[t]  # [H, P]
            held = decay * held + taken[:, :, None] * keys[t][:, None, :]
            y = (held * queries[t][:, None, :]).sum(-1)
            if d is not None:
                y = y + d.to(wide.dtype)[:, None] * wide[t]
            out[t] = y.to(x.dtype)
        keep(state, state_out, r, held)
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
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    values = widened(value)
    heads, size = value.shape[1:]
    group = heads // key.shape[1]
    queries, keys = (_unit(x.to(values.dtype), l2_norm_eps) for x in (query, key))
    queries = queries.repeat_interleave(group, dim=1)
    keys = keys.repeat_interleave(group, dim=1)
    rate = torch.exp(a_log.to(values.dtype))
    rate = rate if gate.dim() == 2 else rate[:, None]
    opened = gate.to(values.dtype) + dt_bias.to(values.dtype)
    if lower_bound is None:
        log_decay = -rate * F.softplus(opened)
    else:
        log_decay = lower_bound * torch.sigmoid(rate * opened)
    if gate.dim() == 2:
        log_decay = log_decay[:, :, None]
    strength = beta_scale * torch.sigmoid(beta.to(values.dtype))
    for r, rows in requests(cu_seqlens_q):
        held = started(state, state_in, r, (heads, key.shape[2], size), values)
        for t in range(rows.start, rows.stop):
            held = torch.exp(log_decay[t])[:, :, None] * held
            recalled = (held * keys[t][:, :, None]).sum(1)  # [Hv, P]
            new = strength[t][:, None] * (values[t] - recalled)
            held = held + keys[t][:, :, None] * new[:, None, :]
            out[t] = (scale * (held * queries[t][:, :, None]).sum(1)).to(out.dtype)
        keep(state, state_out, r, held)
    return out


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
    """See :class:`headrace_core.ops.RGLRUOp`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    wide = widened(x)
    dtype = wide.dtype
    taken = wide * torch.sigmoid(input_gate.to(dtype) + input_bias.to(dtype))
    opened = torch.sigmoid(decay_gate.to(dtype) + decay_bias.to(dtype))
    log_decay = -8.0 * F.softplus(decay.to(dtype)) * opened
    shares = torch.sqrt(1 - torch.exp(2 * log_decay))
    for r, rows in requests(cu_seqlens_q):
        h = started(state, state_in, r, (x.shape[1],), wide)
        begins = state is None or state_in is None or int(state_in[r]) < 0
        for t in range(rows.start, rows.stop):
            first = begins and t == rows.start
            h = taken[t] if first else torch.exp(log_decay[t]) * h + shares[t] * taken[t]
            out[t] = h.to(x.dtype)
        keep(state, state_out, r, h)
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
    """See :class:`headrace_core.ops.WKVOp`."""
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    keys, values = widened(key), widened(value)
    decay, first = decay.to(values.dtype), first.to(values.dtype)
    for r, rows in requests(cu_seqlens_q):
        held = started(state, state_in, r, (3, value.shape[1]), values)
        if state is None or state_in is None or int(state_in[r]) < 0:
            held[2] = WKV_BEGIN
        for t in range(rows.start, rows.stop):
            k, v = keys[t], values[t]
            total, weight, _ = _averaged(held, first + k, v)
            out[t] = (total / weight).to(out.dtype)
            decayed = torch.stack((held[0], held[1], held[2] + decay))
            held = torch.stack(_averaged(decayed, k, v))
        keep(state, state_out, r, held)
    return out


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    eps: float,
) -> Tensor:
    """See :class:`headrace_core.ops.MLSTMOp`."""
    out = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    values = widened(value)
    queries, keys = scale * query.to(values.dtype), key.to(values.dtype)
    taken, kept = input_gate.to(values.dtype), F.logsigmoid(forget_gate.to(values.dtype))
    heads, length, size = *key.shape[1:], value.shape[2]
    for r, rows in requests(cu_seqlens_q):
        held = started(state, state_in, r, (heads, length * size + length + 1), values)
        memory = held[:, : length * size].reshape(heads, length, size)
        normaliser, log = held[:, length * size : -1], held[:, -1:]
        for t in range(rows.start, rows.stop):
            most = torch.maximum(kept[t, :, None] + log, taken[t, :, None])  # [H, 1]
            old, new = torch.exp(kept[t, :, None] + log - most), torch.exp(taken[t, :, None] - most)
            added = new * keys[t]
            memory = old[..., None] * memory + added[:, :, None] * values[t][:, None, :]
            normaliser, log = old * normaliser + added, most
            found = (memory * queries[t][:, :, None]).sum(1)  # [H, P]
            weight = (normaliser * queries[t]).sum(1, keepdim=True).abs()
            out[t] = (found / (torch.maximum(weight, torch.exp(-log)) + eps)).to(out.dtype)
        keep(state, state_out, r, torch.cat((memory.flatten(1), normaliser, log), dim=1))
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
    wide, wide_gate = widened(x), widened(gate)
    gates = F.silu(wide_gate) if activation == "silu" else torch.sigmoid(wide_gate)
    if not norm_first:
        wide = wide * gates
    size = group_size or x.shape[-1]
    groups = wide.reshape(x.shape[0], -1, size)
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    normed = (normed * weight.to(wide.dtype).view(-1, size)).flatten(1)
    return (normed * gates if norm_first else normed).to(x.dtype)


def requests(cu_seqlens_q: Tensor) -> Iterator[tuple[int, slice]]:
    """Each request's index and rows; those without rows are left out."""
    bounds = cu_seqlens_q.tolist()
    for b, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            yield b, slice(start, end)


def started(
    state: Tensor | None, state_in: Tensor | None, b: int, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """What request b starts from, in ``like``'s dtype."""
    if state is not None and state_in is not None and (block := int(state_in[b])) >= 0:
        return state[block].to(like.dtype)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def keep(state: Tensor | None, state_out: Tensor | None, b: int, value: Tensor) -> None:
    """Store request b's last state."""
    if state is not None and state_out is not None:
        state[int(state_out[b])] = value.to(state.dtype)


def _steps(
    dt: Tensor | None, dt_bias: Tensor | None, limits: tuple[float, float], x: Tensor
) -> Tensor:
    if dt is None:
        return torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
    raw = dt.to(x.dtype) if dt_bias is None else dt.to(x.dtype) + dt_bias.to(x.dtype)
    return F.softplus(raw).clamp(*limits)


def _averaged(held: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator and denominator once a term of weight ``exp(k)`` is added, and their logarithm."""
    total, weight, log = held
    most = torch.maximum(log, k)
    old, new = torch.exp(log - most), torch.exp(k - most)
    return old * total + new * v, old * weight + new, most


def _unit(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)
