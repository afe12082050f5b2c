"""Which experts a row goes to."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.reference.dtypes import widened


def topk_softmax(x: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.TopKSoftmaxOp`."""
    ids = torch.argsort(x, dim=-1, descending=True, stable=True)[:, :k]
    weights = torch.softmax(widened(x), dim=-1).gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


def route_experts(
    x: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    renormalise: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.RouteExpertsOp`."""
    wide = widened(x)
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    # Without a bias the order is that of x itself: rounding may make equals of different ones.
    ranked = wide if bias is None and scoring == "softmax" else scores
    ranked = ranked if bias is None else ranked + bias.to(ranked.dtype)
    if num_groups > 1:
        ranked = _of_best_groups(ranked, num_groups, top_groups, group_score)
    ids = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return weights * scale, ids


def _of_best_groups(ranked: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """-inf for the experts of all other groups."""
    grouped = ranked.view(ranked.shape[0], num_groups, -1)  # [T, G, E / G]
    best = grouped.topk(1 if group_score == "max" else 2, dim=-1).values.sum(-1)
    order = torch.argsort(best, dim=-1, descending=True, stable=True)[:, :top_groups]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
    return grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1)
