"""Log-probabilities (or logits) of given and best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.ops import TopLogprobs
from headrace_reference.dtypes import widened
from headrace_reference.filters import first_largest


def top_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
) -> TopLogprobs:
    """See :class:`headrace_core.ops.TopLogprobsOp`."""
    values, usable = _values(logits, normalize)
    token_ids = token_ids.to(values.device)
    own = values.gather(1, token_ids[:, None])
    own_ranks = (values > own).sum(dim=-1) + 1
    num_rows, wanted = len(counts), counts.tolist()
    width = 1 + max(wanted, default=0)
    out = TopLogprobs(
        torch.zeros(num_rows, width, dtype=torch.int64),
        torch.zeros(num_rows, width),
        torch.zeros(num_rows, width, dtype=torch.int64),
        torch.ones(num_rows, dtype=torch.int64),
    )
    out.token_ids[:, 0], out.values[:, :1], out.ranks[:, 0] = token_ids, own, own_ranks
    best = torch.topk(values, min(width, values.shape[1]), dim=-1)
    for r, count in enumerate(wanted):
        if count and bool(usable[r]):
            ids, numbers = _best(values[r], best.indices[r], best.values[r], count)
            others = ids != token_ids[r]
            size = 1 + int(others.sum())
            out.token_ids[r, 1:size] = ids[others]
            out.values[r, 1:size] = numbers[others]
            out.ranks[r, 1:size] = _ranks(numbers)[others]
            out.sizes[r] = size
    return out


def fake_top_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
) -> TopLogprobs:
    """As wide as it can be, since the counts are not read."""
    shape = (logits.shape[0], logits.shape[1] + 1)
    ids, ranks = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    return TopLogprobs(ids, torch.empty(shape), ranks, torch.empty(shape[0], dtype=torch.int64))


def _values(logits: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Values [T, V], NaN throughout rows that have none, and which rows have [T] bool."""
    values = widened(logits)
    largest = values.amax(dim=-1, keepdim=True)
    usable = largest < torch.inf
    if normalize:
        usable &= largest > -torch.inf
        distance = values - largest
        values = distance - distance.exp().double().sum(dim=-1, keepdim=True).log().to(values.dtype)
    return torch.where(usable, values, torch.nan), usable.squeeze(1)


def _best(values: Tensor, ids: Tensor, best: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the ``count`` best of values [V]; (best, ids) is what topk found for one
    more, unless that is all: then equal values stand on both sides of the edge."""
    # Which of equal values topk picks, and in what order, is nobody's promise: pick again.
    if not bool((best[1 : count + 1] == best[:count][: len(best) - 1]).any()):
        return ids[:count], best[:count]
    wanted = torch.tensor([count], device=values.device)
    mine = first_largest(values[None], wanted, best[count - 1 : count])[0].nonzero().squeeze(1)
    found, order = torch.sort(values[mine], descending=True, stable=True)
    return mine[order], found


def _ranks(values: Tensor) -> Tensor:
    """1-based ranks of values [n] that descend; equal ones share the first's."""
    places = torch.arange(1, len(values) + 1, device=values.device)
    places[1:][values[1:] == values[:-1]] = 0
    return places.cummax(0).values
