"""Meaning of a mask of transformers, read off the function that says it of each query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import UnsupportedModel

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of (batch, head, query, key) indices -> True if the query sees the key."""


class MaskFacts(NamedTuple):
    """A mask that headrace's attention knows."""

    causal: bool
    window: int | None = None
    """A query at p sees keys less than so far away."""
    chunk: int | None = None
    """A query sees keys of its own chunk."""


def read_mask(function: MaskFunction, length: int) -> MaskFacts:
    """Facts of the mask ``function`` for sequences of up to ``length`` tokens.

    It is asked for whole rows at both ends, and where the kinds of mask differ. What no query within
    ``length`` can tell from full attention is full attention.

    Raises:
        UnsupportedModel: it is none of the kinds that are known.
    """
    keys = torch.arange(length)

    def row(query: int) -> Tensor:
        return _asked(function, torch.tensor([query]), keys)

    seen_first = _asked(function, keys, torch.tensor([0]))  # by which queries is key 0 seen?
    causal = length == 1 or not bool(row(0)[1:].any())
    reach = int(seen_first.long().argmin()) if not bool(seen_first.all()) else length
    if reach == 0 or reach == length:  # none sees the first key: whatever it is, it is not this
        facts = MaskFacts(causal)
    elif causal and not bool(row(reach)[reach - 1]):
        facts = MaskFacts(causal, chunk=reach)
    else:
        facts = MaskFacts(causal, window=reach)
    probes = {
        0,
        1,
        length // 3,
        length // 2,
        reach - 1,
        reach,
        2 * reach - 1,
        2 * reach,
        length - 1,
    }
    for query in sorted(q for q in probes if 0 <= q < length):
        if not torch.equal(row(query), _expected(facts, query, keys)):
            raise UnsupportedModel("its mask is neither causal, full, of a window nor of chunks")
    return facts


def _asked(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int64)
    try:
        answer = function(zero, zero, queries, keys)
    except IndexError as error:  # it looks tokens up, of which there are only a few now
        raise UnsupportedModel(
            "its mask depends on which token is what (parts of media that see each other)"
        ) from error
    return torch.as_tensor(answer).expand(max(len(queries), len(keys))).bool()


def _expected(facts: MaskFacts, query: int, keys: Tensor) -> Tensor:
    seen = keys <= query if facts.causal else torch.ones_like(keys, dtype=torch.bool)
    if facts.window is not None:
        seen = seen & ((keys - query).abs() < facts.window)
    if facts.chunk is not None:
        seen = seen & (keys // facts.chunk == query // facts.chunk)
    return seen
