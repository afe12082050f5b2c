"""Earlier occurrences of a sequence's end: where the same tokens came before, the same may follow."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]
MOST_PLACES = 64
"""Occurrences that are looked at, the latest ones: older ones seldom change a vote."""


class Guess(NamedTuple):
    """Tokens that may follow, and the expected number of right ones among them."""

    token_ids: list[int]
    score: float


NO_GUESS = Guess([], 0.0)


class Occurrences(NamedTuple):
    """Where the end of a sequence was before."""

    places: Ids
    """Index behind each occurrence, ascending."""
    length: int
    """Tokens that agree, at least; 0: there are none."""


def earlier_ends(token_ids: Ids, longest: int, shortest: int = 1) -> Occurrences:
    """Places at which the last ``n`` tokens came before, for the largest n up to ``longest`` that has any.

    Args:
        token_ids: [L]; the sequence.
        shortest: smallest n that counts.
    """
    last = len(token_ids) - 1
    places = np.flatnonzero(token_ids[:last] == token_ids[last]) if last > 0 else np.zeros(0, int)
    length = 1
    if not len(places):
        return Occurrences(places, 0)
    while length < longest and length < last:
        further = places[places >= length]
        further = further[token_ids[further - length] == token_ids[last - length]]
        if not len(further):
            break
        places, length = further, length + 1
    if length < shortest:
        return Occurrences(places[:0], 0)
    return Occurrences(places[-MOST_PLACES:] + 1, length)


def vote(sources: list[tuple[Ids, Ids]], most: int, least_probability: float) -> Guess:
    """The tokens that followed most often, one after the other, as long as they are likely enough.

    Args:
        sources: (token ids, places): where each place stands for an occurrence whose next token is there.
        most: tokens.
        least_probability: of a token, the ones before it included.
    """
    found: list[int] = []
    probability, score = 1.0, 0.0
    while len(found) < most:
        nexts = [ids[places[places < len(ids)]] for ids, places in sources]
        followers = np.concatenate(nexts) if nexts else np.zeros(0, int)
        if not len(followers):
            break
        values, counts = np.unique(followers, return_counts=True)
        best = int(counts.argmax())
        probability *= float(counts[best]) / len(followers)
        if probability < least_probability or values[best] < 0:
            break
        token = int(values[best])
        found.append(token)
        score += probability
        sources = [(ids, _agreeing(ids, places, token)) for ids, places in sources]
    return Guess(found, score)


def _agreeing(ids: Ids, places: Ids, token: int) -> Ids:
    """The places behind, of those where the token stands."""
    places = places[places < len(ids)]
    behind: Ids = places[ids[places] == token] + 1
    return behind
