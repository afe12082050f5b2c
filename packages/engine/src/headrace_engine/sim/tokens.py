"""Tokens that the simulated device generates: a function of seeds and position alone.

Whoever knows a request's seed knows its whole output, so a test can check every token of every
stream, and a token that is lost, doubled or another request's is seen at once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
MAX_DRAWS = 64
"""Tokens tried before a permitted one is looked for in order."""


def mixed(*numbers: int) -> int:
    """64 bits that depend on all the numbers (splitmix64, Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mixed_further(states: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`mixed` of one number more, for many at once: equal to ``mixed(*before, number)`` where a state
    is ``mixed(*before)``.

    Args:
        states: ``[n]``.
        numbers: ``[n]``.
    """
    states = states + numbers + np.uint64(0x9E3779B97F4A7C15)
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def seed_of(prompt_token_ids: Sequence[int]) -> int:
    """The seed of a request that brings none."""
    return zlib.crc32(struct.pack(f"<{len(prompt_token_ids)}q", *prompt_token_ids))


def simulated_token(
    engine_seed: int,
    request_seed: int,
    position: int,
    vocab_size: int,
    is_permitted: Callable[[int], bool],
) -> int:
    """The token at a position of a request's output, counted from 0.

    Raises:
        ValueError: no token is permitted.
    """
    start = mixed(engine_seed, request_seed, position)
    token = start % vocab_size
    for draw in range(1, MAX_DRAWS):
        if is_permitted(token):
            return token
        token = mixed(start, draw) % vocab_size
    for offset in range(vocab_size):
        token = (start + offset) % vocab_size
        if is_permitted(token):
            return token
    raise ValueError("no token is permitted")


def expected_tokens(
    request_seed: int,
    count: int,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    engine_seed: int = 0,
) -> list[int]:
    """The first tokens of a request that permits all tokens but those that end a model's output."""
    ends = frozenset(eos_token_ids)
    return [
        simulated_token(engine_seed, request_seed, i, vocab_size, lambda token: token not in ends)
        for i in range(count)
    ]
