"""Log-probabilities (or logits) of chosen and best tokens, as the results carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.ops import TopLogprobsOp
from headrace_core.step import TokenLogprobs

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

_FEW = 128
"""Rows that want more are described one by one: one row's whole vocabulary would else become the
width of every row."""


def describe(
    op: TopLogprobsOp, logits: Tensor, chosen: Tensor, wanted: npt.NDArray[np.int64], mode: str
) -> list[TokenLogprobs]:
    """One entry per row: the chosen token, then the best ones without it.

    Order: by value, equal ones by token id. Rank: 1 + number of strictly greater values. A row
    without log-probabilities has one value, NaN.

    Args:
        op: computes them.
        logits: [R, V], any floating dtype.
        chosen: [R] int64.
        wanted: [R]; how many best tokens; -1 = all.
        mode: one of :data:`MODES`.
    """
    vocab_size = logits.shape[1]
    counts = np.where(wanted < 0, vocab_size, np.minimum(wanted, vocab_size))
    normalize = mode.endswith("logprobs")
    if counts.max(initial=0) <= _FEW:
        return list(_entries(op, logits, chosen, counts, normalize))
    entries: dict[int, TokenLogprobs] = {}
    few = np.flatnonzero(counts <= _FEW)
    for rows in [few, *np.flatnonzero(counts > _FEW)[:, None]]:
        index = torch.from_numpy(rows).to(logits.device)
        found = _entries(op, logits[index], chosen[index], counts[rows], normalize)
        entries.update(zip(rows.tolist(), found))
    return [entries[r] for r in range(len(counts))]


def describe_tokens(
    op: TopLogprobsOp, row: Tensor, token_ids: Sequence[int], mode: str
) -> TokenLogprobs:
    """Named tokens of one row [V], in their order; the numbers are those that :func:`describe` gives."""
    chosen = torch.tensor(token_ids, device=row.device)
    logits = row.expand(len(token_ids), -1).contiguous()
    found = describe(op, logits, chosen, np.zeros(len(token_ids), np.int64), mode)
    return TokenLogprobs(
        [one.token_ids[0] for one in found],
        [one.logprobs[0] for one in found],
        [one.ranks[0] for one in found],
    )


def joined(entry: TokenLogprobs, further: TokenLogprobs) -> TokenLogprobs:
    """An entry with further tokens behind its own, none twice."""
    known = set(entry.token_ids)
    new = [i for i, t in enumerate(further.token_ids)
           if t not in known and t not in further.token_ids[:i]]  # fmt: skip
    return TokenLogprobs(
        entry.token_ids + [further.token_ids[i] for i in new],
        entry.logprobs + [further.logprobs[i] for i in new],
        entry.ranks + [further.ranks[i] for i in new],
    )


def _entries(
    op: TopLogprobsOp,
    logits: Tensor,
    chosen: Tensor,
    counts: npt.NDArray[np.int64],
    normalize: bool,
) -> Iterator[TokenLogprobs]:
    found = op(logits, chosen, torch.from_numpy(counts), normalize=normalize)
    columns = (found.token_ids, found.values, found.ranks, found.sizes)
    for ids, values, ranks, size in zip(*(column.tolist() for column in columns)):
        yield TokenLogprobs(ids[:size], values[:size], ranks[:size])
