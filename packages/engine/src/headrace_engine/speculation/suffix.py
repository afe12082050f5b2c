"""Guesses by all earlier occurrences of the last tokens: in the request itself, and in earlier outputs.

Oliaro et al. 2024, arXiv:2411.04975 (SuffixDecoding): the longest matching end is sought, occurrences vote
for each next token, and the guess is as long as the match is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace_core.speculation import DraftProposer, DraftTask
from headrace_engine.speculation.matching import (
    MOST_PLACES,
    NO_GUESS,
    Guess,
    Ids,
    earlier_ends,
    vote,
)

_KEY = 3
"""Tokens by which earlier outputs are found: shorter ends occur everywhere."""


class SuffixProposer(DraftProposer):
    """Proposes by votes of occurrences.

    Args:
        settings: the ``suffix_decoding_*`` fields, checked.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._depth = int(settings["suffix_decoding_max_tree_depth"])
        self._factor = float(settings["suffix_decoding_max_spec_factor"])
        self._least = float(settings["suffix_decoding_min_token_prob"])
        self._earlier = EarlierOutputs(int(settings["suffix_decoding_max_cached_requests"]))

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """See :class:`headrace_core.speculation.DraftProposer`."""
        return [self._best(task).token_ids for task in tasks]

    def finish(self, request_id: str, token_ids: Any, num_prompt_tokens: int) -> None:
        """Keep the output for other requests."""
        self._earlier.keep(request_id, token_ids[num_prompt_tokens:])

    def _best(self, task: DraftTask) -> Guess:
        ids = task.token_ids
        own = earlier_ends(ids, self._depth)
        guess = NO_GUESS
        if own.length:
            guess = self._voted([(ids, own.places)], own.length, task.most)
        sources, length = self._earlier.ends(ids, self._depth)
        if length < own.length or not sources:
            return guess
        other = self._voted(sources, length, task.most)
        return max(guess, other, key=lambda one: one.score)

    def _voted(self, sources: list[tuple[Ids, Ids]], length: int, most: int) -> Guess:
        return vote(sources, min(most, max(1, int(self._factor * length))), self._least)


class EarlierOutputs:
    """Outputs of requests that have ended, found by three tokens in a row.

    Args:
        most: outputs that are kept; the oldest goes first. 0: none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._outputs: OrderedDict[str, Ids] = OrderedDict()
        self._places: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        """Three tokens -> (output, index behind them), the oldest first."""

    def __len__(self) -> int:
        return len(self._outputs)

    def keep(self, request_id: str, token_ids: Ids) -> None:
        """Take an output in; one of the same request that is longer takes its place."""
        if not self._most or len(token_ids) <= _KEY:
            return
        if request_id in self._outputs:
            self._forget(request_id)
        elif len(self._outputs) >= self._most:
            self._forget(next(iter(self._outputs)))
        self._outputs[request_id] = output = np.array(token_ids, np.int32)
        for key, place in _keys(output):
            self._places.setdefault(key, []).append((request_id, place))

    def ends(self, token_ids: Ids, longest: int) -> tuple[list[tuple[Ids, Ids]], int]:
        """Outputs with the places behind the longest end of ``token_ids`` that occurs in any, and its
        length."""
        if len(token_ids) < _KEY:
            return [], 0
        found = self._places.get(tuple(token_ids[-_KEY:].tolist()), [])[-MOST_PLACES:]
        best: list[tuple[str, int]] = []
        longest_found = 0
        for request_id, place in found:
            length = _agreeing_before(self._outputs[request_id], place, token_ids, longest)
            if length > longest_found:
                best, longest_found = [], length
            if length == longest_found:
                best.append((request_id, place))
        by_output: dict[str, list[int]] = {}
        for request_id, place in best:
            by_output.setdefault(request_id, []).append(place)
        return [(self._outputs[i], np.array(p)) for i, p in by_output.items()], longest_found

    def _forget(self, request_id: str) -> None:
        for key, _ in _keys(self._outputs.pop(request_id)):
            left = [pair for pair in self._places.get(key, []) if pair[0] != request_id]
            if left:
                self._places[key] = left
            else:
                self._places.pop(key, None)


def _keys(output: Ids) -> list[tuple[tuple[int, ...], int]]:
    ids = output.tolist()
    return [(tuple(ids[i - _KEY : i]), i) for i in range(_KEY, len(ids))]


def _agreeing_before(output: Ids, place: int, token_ids: Ids, longest: int) -> int:
    """Tokens before ``place`` that are the last ones of ``token_ids``."""
    count = min(place, len(token_ids), longest)
    same = output[place - count : place] == token_ids[len(token_ids) - count :]
    different = np.flatnonzero(~same)
    return count if not len(different) else int(count - 1 - different[-1])
