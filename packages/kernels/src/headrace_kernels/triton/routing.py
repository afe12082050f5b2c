"""Routing of rows to experts, one program a row: :class:`headrace_core.ops.RouteExpertsOp`.

A row's scores are one tile [groups, experts of a group], so what is said of a group is a reduction
along the second axis. Experts are taken out one after the other; of equal ones the lowest number is the
first.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import SCORINGS
from headrace_kernels.triton.launch import padded


@triton.jit
def _largest(tile):
    return tl.max(tl.max(tile, axis=1), axis=0)


@triton.jit
def _first_of(tile, value, number, LAST: tl.constexpr):
    """The lowest number at which the tile has the value; the last one where NaN hides it."""
    found = tl.where(tile == value, number, LAST)
    return tl.min(tl.min(found, axis=1), axis=0)


@triton.jit
def _total(tile):
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit
def _of_best_groups(ranked, counted, group, TOP_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
                    GROUPS: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """ranked, with -inf for the experts of all other groups."""
    if SUM_OF_TWO:
        best = tl.max(counted, axis=1)
        place = tl.arange(0, counted.shape[1])[None, :]
        at = tl.min(tl.where(counted == best[:, None], place, counted.shape[1]), axis=1)
        second = tl.max(tl.where(place == at[:, None], float("-inf"), counted), axis=1)
        value = tl.where(second == float("-inf"), best, best + second)  # groups of one
    else:
        value = tl.max(ranked, axis=1)
    kept = tl.zeros_like(value)
    row = tl.max(group, axis=1)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(value, axis=0)
        at = tl.min(tl.where(value == top, row, GROUPS - 1), axis=0)
        kept = tl.where(row == at, 1.0, kept)
        value = tl.where(row == at, float("-inf"), value)
    return tl.where(kept[:, None] > 0.0, ranked, float("-inf"))


@triton.jit
def _route_kernel(
    x_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    x_stride,
    scale,
    jitter,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    RENORMALISE: tl.constexpr,
    G_BLOCK: tl.constexpr,
    S_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G_BLOCK)[:, None] + tl.zeros((1, S_BLOCK), tl.int32)
    place = tl.arange(0, S_BLOCK)[None, :] + tl.zeros((G_BLOCK, 1), tl.int32)
    inside = (group < GROUPS) & (place < SIZE)
    number = group * SIZE + place
    x = tl.load(x_ptr + token * x_stride + number, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x, float("-inf"))
    if SCORING == "sigmoid":
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - _largest(x))
        scores = scores / _total(scores)
    ranked = x  # rounding in the scores would make equals of different ones
    if HAS_BIAS:
        ranked = scores + tl.load(bias_ptr + number, mask=inside, other=0.0)
        ranked = tl.where(inside, ranked, float("-inf"))
    if GROUPS > 1:
        counted = ranked if HAS_BIAS else tl.where(inside, scores, float("-inf"))
        ranked = _of_best_groups(
            ranked, counted, group, TOP_GROUPS, SUM_OF_TWO, GROUPS, GROUPS * SIZE - 1
        )

    index = tl.arange(0, K_BLOCK)
    chosen = tl.zeros((K_BLOCK,), tl.float32)
    for step in tl.static_range(K):
        own = _largest(ranked)
        best = _first_of(ranked, own, number, GROUPS * SIZE - 1)
        if SCORING == "sparsemixer":
            size = tl.abs(ranked)
            near = (own - ranked) <= 2.0 * jitter * tl.where(size > own, size, own)
            near = near & (ranked > float("-inf"))
            weight = 1.0 / _total(tl.where(near, tl.exp(ranked - own), 0.0))
        else:
            weight = _total(tl.where(number == best, tl.where(inside, scores, 0.0), 0.0))
        chosen = tl.where(index == step, weight, chosen)
        tl.store(ids_ptr + token * K + step, best.to(tl.int64))
        ranked = tl.where(number == best, float("-inf"), ranked)
    if RENORMALISE:
        total = tl.sum(chosen, axis=0)
        chosen = chosen / tl.where(total < 1e-20, 1e-20, total)
    tl.store(weights_ptr + token * K + index, chosen * scale, mask=index < K)


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
    if scoring not in SCORINGS:
        raise ConfigError(f"route_experts: scoring = {scoring!r}: must be one of {list(SCORINGS)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, experts = x.shape
    weights = torch.empty((rows, k), dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=x.device)
    if rows:
        _route_kernel[(rows,)](
            x,
            bias,
            weights,
            ids,
            x.stride(0),
            scale,
            jitter,
            K=k,
            SCORING=scoring,
            HAS_BIAS=bias is not None,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            SIZE=experts // num_groups,
            SUM_OF_TWO=group_score == "top2",
            RENORMALISE=renormalise,
            G_BLOCK=padded(num_groups),
            S_BLOCK=padded(experts // num_groups),
            K_BLOCK=padded(k),
            num_warps=1,
        )
    return weights, ids
