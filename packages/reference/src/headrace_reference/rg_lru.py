"""``rg_lru``: the real-gated linear recurrent unit (RecurrentGemma)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened
from headrace_reference.recurrent import keep, requests, started


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


def fake_rg_lru(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(x, *x.shape)
