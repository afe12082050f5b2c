"""Routing of rows to experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import SCORINGS
from headrace_reference.dtypes import widened


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
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.RouteExpertsOp`.

    Raises:
        ConfigError: scoring is not one of :data:`headrace_core.ops.SCORINGS`.
    """
    wide = widened(x)
    if scoring == "sparsemixer":
        return _in_turn(wide, k, jitter, renormalise, scale)
    if scoring not in SCORINGS:
        raise ConfigError(f"route_experts: scoring = {scoring!r}: must be one of {list(SCORINGS)}")
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    # Without a bias the order is that of x itself: rounding may make equals of different ones.
    ranked = wide if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        ranked = _of_best_groups(ranked, scores, bias, num_groups, top_groups, group_score)
    ids = torch.argsort(ranked, dim=-1, descending=True, stable=True)[:, :k]
    return _weighed(scores.gather(1, ids), renormalise, scale), ids


def fake_route_experts(x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    weights = torch.empty((x.shape[0], k), dtype=torch.float32, device=x.device)
    return weights, torch.empty((x.shape[0], k), dtype=torch.int64, device=x.device)


def _of_best_groups(
    ranked: Tensor,
    scores: Tensor,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    group_score: str,
) -> Tensor:
    """``ranked``, with -inf for the experts of all other groups."""
    counted = scores if bias is None else ranked  # sums of two are of scores
    grouped = torch.unflatten(counted, 1, (num_groups, -1))  # [T, G, E / G]
    if group_score == "max":
        best = ranked.view(grouped.shape).amax(-1)
    else:
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    order = torch.argsort(best, dim=-1, descending=True, stable=True)[:, :top_groups]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
    return ranked.view(grouped.shape).masked_fill(~chosen[:, :, None], -torch.inf).flatten(1)


def _in_turn(
    x: Tensor, k: int, jitter: float, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Sparsemixer's choice."""
    left, weights, ids = x, [], []
    for _ in range(k):
        own, best = left.max(dim=-1, keepdim=True)
        far = (own - x) > 2 * jitter * torch.maximum(x.abs(), own)
        share = torch.softmax(left.masked_fill(far, -torch.inf), dim=-1)
        weights.append(share.gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, -torch.inf)
    return _weighed(torch.cat(weights, dim=1), renormalise, scale), torch.cat(ids, dim=1)


def _weighed(weights: Tensor, renormalise: bool, scale: float) -> Tensor:
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return weights * scale
