"""``mlstm``: the matrix memory of xLSTM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened
from headrace_reference.recurrent import keep, requests, started


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
    """See :class:`headrace_core.ops.optional.mlstm.MLSTMOp`."""
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


def fake_mlstm(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return unset_like(value, *value.shape)
