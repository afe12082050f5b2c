"""Log-probabilities (or logits) of chosen and best tokens, for the rows that asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace_core.step import TokenLogprobs
from headrace_engine.sampling.filters import first_largest

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def values_for(mode: str, logits: Tensor) -> Tensor:
    """A new tensor [R, V]: log-softmax, or a copy of the logits."""
    return torch.log_softmax(logits, dim=-1) if mode.endswith("logprobs") else logits.clone()


def describe(values: Tensor, chosen: Tensor, wanted: Sequence[int]) -> Iterator[TokenLogprobs]:
    """One entry per row: the chosen token, then the best ones without it.

    Order: by value, equal ones by token id. Rank: 1 + number of strictly greater values.

    Args:
        values: [R, V] float32; changed.
        chosen: [R] int64.
        wanted: how many best tokens per row; -1 = all.
    """
    vocab_size = values.shape[1]
    counts = [vocab_size if n < 0 else min(n, vocab_size) for n in wanted]
    own = values.gather(1, chosen[:, None])
    own_ranks = ((values > own).sum(dim=-1) + 1).tolist()
    best = _best(values, counts)
    for row in zip(chosen.tolist(), own.squeeze(1).tolist(), own_ranks, *best):
        yield _entry(*row)


def _entry(
    token: int, value: float, rank: int, best_ids: list[int], best_values: list[float]
) -> TokenLogprobs:
    ids, values, ranks = [token], [value], [rank]
    rank_of_equals = 0
    for i, (other, other_value) in enumerate(zip(best_ids, best_values)):
        if i == 0 or other_value != best_values[i - 1]:
            rank_of_equals = i + 1
        if other != token:
            ids.append(other)
            values.append(other_value)
            ranks.append(rank_of_equals)
    return TokenLogprobs(ids, values, ranks)


def _best(values: Tensor, counts: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and values of each row's best tokens; see :func:`describe` for the order."""
    most = max(counts)
    if most == 0:
        return [[] for _ in counts], [[] for _ in counts]
    # One more than wanted, to see whether equal values stand on both sides of the edge.
    top = torch.topk(values, min(most + 1, values.shape[1]), dim=-1)
    # Which of equal values topk picks, and in what order, is nobody's promise: pick again.
    has_ties = (top.values[:, 1:] == top.values[:, :-1]).any(dim=-1).tolist()
    ids: list[list[int]] = []
    numbers: list[list[float]] = []
    for r, (count, tokens, row) in enumerate(
        zip(counts, top.indices.tolist(), top.values.tolist())
    ):
        if has_ties[r] and count:
            tokens, row = _lowest_ids_first(values[r], count)
        ids.append(tokens[:count])
        numbers.append(row[:count])
    return ids, numbers


def _lowest_ids_first(values: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Ids and values of the ``count`` largest of values [V]."""
    edge = torch.topk(values, count).values[-1:]
    wanted = torch.tensor([count], device=values.device)
    mine = first_largest(values[None], wanted, edge)[0].nonzero().squeeze(1)
    found, order = torch.sort(values[mine], descending=True, stable=True)
    return mine[order].tolist(), found.tolist()
