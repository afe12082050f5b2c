"""``index_tokens``: the tokens that sparse MLA attends to (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_reference.attention import gather, visibility
from headrace_reference.dtypes import widened


def index_tokens(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    top_k: int,
) -> Tensor:
    """See :class:`headrace_core.ops.optional.index_tokens.IndexTokensOp`."""
    out = torch.full((query.shape[0], top_k), -1, dtype=torch.int32, device=query.device)
    starts = cu_seqlens_q.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        key = gather(cache[:, :, None], block_table[b], seq_len)[:, 0]
        scores = torch.einsum("qhd,kd->qhk", widened(query[rows]), widened(key)).relu()
        scores = torch.einsum("qh,qhk->qk", widened(weights[rows]), scores)
        visible = visibility(scores.shape[0], seq_len, None, query.device)
        order = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True, stable=True)
        best = order.indices[:, :top_k]
        best = torch.where(visible.gather(1, best), best, seq_len).sort(dim=1).values
        out[rows, : best.shape[1]] = torch.where(best < seq_len, best, -1).int()
    return out


def fake_index_tokens(query: Tensor, *args: Any, top_k: int, **options: Any) -> Tensor:
    return torch.empty((query.shape[0], top_k), dtype=torch.int32, device=query.device)
