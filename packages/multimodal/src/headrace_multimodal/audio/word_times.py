"""When each token was spoken, from how strongly it attends to each part of the audio.

Dynamic time warping over the attention of the heads that align, as Whisper's authors do it
(github.com/openai/whisper, ``timing.py``); Sakoe & Chiba 1978.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Path = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def token_times(weights: npt.NDArray[Any], seconds_per_state: float) -> list[float]:
    """When each token begins.

    Args:
        weights: [tokens, states], what ``SupportsAlignment.align`` gives for the tokens whose times
            are wanted, at least one of each.

    Returns:
        Seconds from the clip's beginning, never decreasing.
    """
    tokens, states = warp(-weights.astype(np.float64))
    first = np.flatnonzero(np.diff(tokens, prepend=-1))
    return [float(state * seconds_per_state) for state in states[first]]


def warp(cost: npt.NDArray[np.float64]) -> Path:
    """The cheapest monotonic way through a matrix [tokens, states], corner to corner.

    Returns:
        Token and state of each step. Of equally cheap ways, the one that stays with a token longest.
    """
    num_tokens, num_states = cost.shape
    total = np.full((num_tokens + 1, num_states + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    came_from = np.full((num_tokens + 1, num_states + 1), _STATE, dtype=np.int8)
    came_from[:, 0] = _TOKEN
    came_from[0, :] = _STATE
    # Cells of one antidiagonal depend only on the two before it.
    for diagonal in range(2, num_tokens + num_states + 1):
        i = np.arange(max(1, diagonal - num_states), min(num_tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, state = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        choice = np.full(len(i), _STATE, dtype=np.int8)
        choice[(token < both) & (token < state)] = _TOKEN
        choice[(both < token) & (both < state)] = _BOTH
        came_from[i, j] = choice
        total[i, j] = cost[i - 1, j - 1] + np.select(
            [choice == _BOTH, choice == _TOKEN], [both, token], state
        )
    return _walked_back(came_from)


_BOTH, _TOKEN, _STATE = 0, 1, 2


def _walked_back(came_from: npt.NDArray[np.int8]) -> Path:
    i, j = came_from.shape[0] - 1, came_from.shape[1] - 1
    steps: list[tuple[int, int]] = []
    while i > 0 or j > 0:
        steps.append((i - 1, j - 1))
        move = came_from[i, j]
        i -= move != _STATE
        j -= move != _TOKEN
    path = np.array(steps[::-1], dtype=np.int64).reshape(-1, 2)
    return path[:, 0], path[:, 1]
