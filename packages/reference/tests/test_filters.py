from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_reference.filters import apply_top_k_top_p, first_largest


def by_definition(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """Sort, cut at k, cut at p: in Python's floats."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    if top_p >= 1:
        return set(order)
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    goal, total, kept = top_p * sum(weights), 0.0, set()
    for i, weight in zip(order, weights):
        if total >= goal:
            break
        kept.add(i)
        total += weight
    return kept


def kept_by(logits: Tensor, top_k: list[int], top_p: list[float]) -> list[set[int]]:
    out = apply_top_k_top_p(logits.clone(), np.array(top_k), np.array(top_p))
    assert torch.equal(out[out > -torch.inf], logits[out > -torch.inf])
    return [set(row.isfinite().nonzero().squeeze(1).tolist()) for row in out]


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(-6, 6), min_size=12, max_size=12),
            st.integers(0, 14),
            st.sampled_from([0.05, 0.3, 0.55, 0.8, 0.97, 1.0]),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=300, deadline=None)
def test_top_k_and_top_p_by_definition_with_many_ties(
    rows: list[tuple[list[int], int, float]],
) -> None:
    logits = torch.tensor([[v / 2 for v in row] for row, _, _ in rows])
    got = kept_by(logits, [k for _, k, _ in rows], [p for _, _, p in rows])
    assert got == [by_definition([v / 2 for v in row], k, p) for row, k, p in rows]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([0, 3, 0, 1500, 0], [0.9, 1.0, 0.05, 1.0, 1.0]),
        ([0, 3, 1500, 5, 2000], [0.9, 0.5, 0.9, 1.0, 0.999]),
        ([0, 0, 0, 0, 0], [0.999, 0.2, 0.6, 0.1, 0.01]),
    ],
)
def test_large_vocabularies_where_the_first_candidates_may_not_do(
    top_k: list[int], top_p: list[float]
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 5000, generator=generator) * torch.tensor([0.1, 3, 8, 1, 0.0])[:, None]
    logits = (logits * 8).round() / 8  # ties
    got = kept_by(logits, top_k, top_p)
    for r in range(5):
        want = by_definition(logits[r].tolist(), top_k[r], top_p[r])
        # Sums in another order may differ in the last bit: one token at the edge.
        assert len(got[r] ^ want) <= 1


def test_first_largest_takes_none_if_none_are_wanted() -> None:
    values = torch.tensor([[1.0, 1.0, 0.0]])
    none = first_largest(values, torch.tensor([0]), torch.tensor([1.0]))
    assert not none.any()


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, 20), -torch.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    assert kept_by(logits, [5], [1.0])[0] == {4, 9}
    assert kept_by(logits, [0], [0.99])[0] == {4, 9}
