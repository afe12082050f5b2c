from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_multimodal.audio.word_times import token_times, warp

sizes = st.integers(1, 7)


@given(sizes, sizes, st.integers(0, 10_000))
def test_the_way_is_a_cheapest_one(tokens, states, seed):
    cost = np.random.default_rng(seed).standard_normal((tokens, states))
    ways, columns = warp(cost)
    assert (ways[0], columns[0]) == (0, 0)
    assert (ways[-1], columns[-1]) == (tokens - 1, states - 1)
    steps = zip(np.diff(ways).tolist(), np.diff(columns).tolist())
    assert set(steps) <= {(1, 0), (0, 1), (1, 1)}
    assert cost[ways, columns].sum() == pytest.approx(_cheapest(cost), abs=1e-4)


def _cheapest(cost: np.ndarray) -> float:
    total = np.full(cost.shape, np.inf)
    for i, j in itertools.product(*map(range, cost.shape)):
        before = [
            total[a, b] for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)) if a >= 0 and b >= 0
        ]
        total[i, j] = cost[i, j] + min(before, default=0.0)
    return float(total[-1, -1])


@settings(deadline=None)  # the first example imports transformers
@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 10_000))
def test_equal_to_transformers(tokens, states, seed):
    theirs = pytest.importorskip("transformers.models.whisper.generation_whisper")
    matrix = np.random.default_rng(seed).standard_normal((tokens, states))
    rows, columns = theirs._dynamic_time_warping(-matrix)
    jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    assert token_times(matrix, 0.02) == pytest.approx(columns[jumps] * 0.02)


def test_times_follow_the_strongest_states():
    matrix = np.full((3, 12), -1.0)
    matrix[0, :4] = matrix[1, 4:9] = matrix[2, 9:] = 1.0
    assert token_times(matrix, 0.5) == [0.0, 2.0, 4.5]


def test_equal_weights_give_ordered_times():
    times = token_times(np.zeros((4, 9)), 1.0)
    assert times == sorted(times)
    assert len(times) == 4
