"""``wkv``: RWKV 4's weighted average over all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened
from headrace_reference.recurrent import keep, requests, started

WKV_BEGIN = -1e38
"""The logarithm that a request begins with, see :class:`headrace_core.ops.optional.wkv.WKVOp`."""


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


def fake_wkv(key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(value, *value.shape)


def _averaged(held: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator and denominator once a term of weight ``exp(k)`` is added, and their logarithm."""
    total, weight, log = held
    most = torch.maximum(log, k)
    old, new = torch.exp(log - most), torch.exp(k - most)
    return old * total + new * v, old * weight + new, most
