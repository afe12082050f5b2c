"""Random choice: the right distribution, from numbers that depend on nothing but the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_core.sampling.params import SamplingParams
from headrace_engine.sampling.state import request_key, uniforms
from headrace_reference import sample
from headrace_reference.sampling import draw

DRAWS = 40_000
DRAWS_TOP_P = 10_000
"""Of top_p, which goes row by row; what it must not choose shows in the first few."""
VOCAB = 24


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """Statistic, and the value that it exceeds with probability about 1e-4 (Wilson-Hilferty)."""
    possible = probabilities > 0
    assert int(counts[~possible].sum()) == 0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = max(1, int(possible.sum()) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic, limit


def draws_for(logits: Tensor, seed: int, **params: Any) -> Tensor:
    """[V] counts of tokens chosen at positions 0, 1, ..."""
    count = DRAWS_TOP_P if "top_p" in params else DRAWS
    p = SamplingParams(seed=seed, **params)
    key = request_key(seed, engine_seed=0, request_id="")
    noise = uniforms(np.full(count, key, np.uint64), np.arange(count))
    tokens, _ = sample(
        logits.expand(count, -1),
        torch.full((count,), p.temperature),
        torch.full((count,), p.min_p),
        torch.full((count,), p.top_k),
        torch.full((count,), p.top_p, dtype=torch.float64),
        torch.from_numpy(noise),
    )
    return torch.bincount(tokens, minlength=len(logits)).double()


LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5


def expected(keep: Any = None, temperature: float = 1.0) -> Tensor:
    x = LOGITS.double() / temperature
    if keep is not None:
        mask = torch.full_like(x, -torch.inf)
        mask[keep(x)] = 0
        x = x + mask
    return x.softmax(-1)


def nucleus(x: Tensor) -> Tensor:
    """The fewest tokens with 0.7 of the probability."""
    p, order = x.softmax(-1).sort(descending=True)
    return order[: int((p.cumsum(-1) < 0.7).sum()) + 1]


@pytest.mark.parametrize("seed", [0, 1, 123456789])
@pytest.mark.parametrize(
    ("params", "probabilities"),
    [
        ({}, expected()),
        ({"temperature": 0.4}, expected(temperature=0.4)),
        ({"temperature": 2.5}, expected(temperature=2.5)),
        ({"top_k": 5}, expected(lambda x: x.topk(5).indices)),
        ({"top_p": 0.7}, expected(nucleus)),
        ({"min_p": 0.1}, expected(lambda x: x.exp() >= 0.1 * x.exp().max())),
        (
            {"temperature": 0.8, "top_k": 6, "min_p": 0.01},
            expected(lambda x: x.topk(6).indices, temperature=0.8),
        ),
    ],
    ids=str,
)
def test_tokens_come_with_their_probabilities(
    seed: int, params: dict[str, Any], probabilities: Tensor
) -> None:
    statistic, limit = chi_square(draws_for(LOGITS, seed, **params), probabilities)
    assert statistic < limit


def test_the_chi_square_test_can_tell() -> None:
    statistic, limit = chi_square(draws_for(LOGITS, 0, temperature=1.05), expected())
    assert statistic > 2 * limit


def test_uniforms_are_uniform_over_positions_and_over_requests() -> None:
    keys = np.array([request_key(s, engine_seed=0, request_id="") for s in range(DRAWS)], np.uint64)
    by_request = uniforms(keys, np.zeros(DRAWS, np.int64))
    by_position = uniforms(np.full(DRAWS, keys[0]), np.arange(DRAWS))
    for numbers in (by_request, by_position):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = torch.from_numpy(np.histogram(numbers, 64, (0, 1))[0].astype(np.float64))
        statistic, limit = chi_square(counts, torch.full((64,), 1 / 64, dtype=torch.float64))
        assert statistic < limit
    # neighbours do not follow each other
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.02
    next_position = uniforms(keys, np.ones(DRAWS, np.int64))
    assert abs(np.corrcoef(by_request, next_position)[0, 1]) < 0.02


def test_the_numbers_are_these() -> None:
    """Seeded outputs that people keep would change with them."""
    key = request_key(42, engine_seed=0, request_id="")
    assert key == 0xCDD05FA97820E70C
    numbers = uniforms(np.full(2, key, np.uint64), np.arange(2))
    assert numbers.tolist() == [0.07086307400198477, 0.164266993543705]
    # SplitMix64 started at 1234567, from its authors' test vector
    known = uniforms(np.full(2, 1234567, np.uint64), np.arange(2)) * 2**53
    assert known.tolist() == [6457827717110365317 >> 11, 3203168211198807973 >> 11]


def test_keys_differ() -> None:
    keys = {
        request_key(seed, engine_seed=engine, request_id=name)
        for seed in (None, 0, 1, -3)
        for engine in (0, 1)
        for name in ("a", "b")
    }
    # with a seed of its own, neither the engine's seed nor the id counts
    assert len(keys) == 3 + 4


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.24999, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)],
)
def test_draw_inverts_the_running_sum(uniform: float, token: int) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    got = draw(weights.log(), torch.tensor([uniform], dtype=torch.float64))
    assert got.tolist() == [token]


def test_seeded_requests_repeat_and_others_depend_on_engine_seed_and_id(kit: Any) -> None:
    logits = torch.zeros(1, 1000)

    def first_tokens(params: SamplingParams, engine_seed: int, name: str) -> list[int]:
        rows = [kit.Row(params, output=[0] * i, request_id=name) for i in range(6)]
        return [int(kit.choose(logits, [row], seed=engine_seed).token_ids[0]) for row in rows]

    seeded = SamplingParams(seed=4)
    assert first_tokens(seeded, 0, "a") == first_tokens(seeded, 1, "b")
    assert first_tokens(seeded, 0, "a") != first_tokens(SamplingParams(seed=5), 0, "a")
    free = SamplingParams()
    assert first_tokens(free, 0, "a") == first_tokens(free, 0, "a")
    assert first_tokens(free, 0, "a") != first_tokens(free, 1, "a")
    assert first_tokens(free, 0, "a") != first_tokens(free, 0, "b")
    assert len(set(first_tokens(seeded, 0, "a"))) > 1
