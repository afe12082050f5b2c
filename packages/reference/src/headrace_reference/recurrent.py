"""Recurrent layers, one request after the other and token by token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_reference.activations import activation as activate
from headrace_reference.dtypes import unset_like, widened


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


def fake_causal_conv(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(x, *x.shape)


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


def fake_selective_scan(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(x, *x.shape)


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


def fake_state_space_scan(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(x, *x.shape)


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


def fake_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    return unset_like(value, *value.shape)


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


def fake_gated_rms_norm(x: Tensor, gate: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(x, *x.shape)


def requests(cu_seqlens_q: Tensor) -> Iterator[tuple[int, slice]]:
    """Each request's index and rows; those without rows are left out."""
    bounds = cu_seqlens_q.tolist()
    for b, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            yield b, slice(start, end)


def started(
    state: Tensor | None, state_in: Tensor | None, b: int, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """Initial state of request b, in ``like``'s dtype."""
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


def _unit(x: Tensor, eps: float | None) -> Tensor:
    if eps is None:
        return x
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)
