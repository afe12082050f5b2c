"""Random numbers that depend on a request and a position, on nothing else.

A request has a 64-bit key; the number for its i-th output token is a hash of (key, i). No state is
advanced, so batching, preemption, restarts and overlapped steps cannot change it.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(seed: int | None, *, engine_seed: int, request_id: str) -> int:
    """The key of a request: of its own seed alone, or of the engine's seed and its id."""
    text = f"request {seed}" if seed is not None else f"engine {engine_seed} {request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), multiples of 2^-53, one per (key, position).

    SplitMix64's output function (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
    generators") at counter ``position + 1`` of the stream that starts at ``key``.
    """
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
