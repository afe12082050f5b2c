"""The float64 definition that backends are compared with, itself against torch and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace_testing.attention.backends import dense_attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_agrees_with_torch(causal: bool, num_kv_heads: int) -> None:
    query = random(6, 4, 8)
    key, value = random(6, num_kv_heads, 8), random(6, num_kv_heads, 8).flip(0)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)),
        is_causal=causal,
        scale=0.3,
        enable_gqa=True,
    )
    out = dense_attention(query, key, value, scale=0.3, causal=causal).output
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-12, rtol=1e-12)


def test_kv_heads_serve_adjacent_query_heads() -> None:
    value = torch.tensor([[[1.0], [2.0]]])  # one token, two kv heads
    out = dense_attention(torch.ones(1, 4, 1), torch.ones(1, 2, 1), value, scale=1.0).output
    assert out.flatten().tolist() == [1, 1, 2, 2]


# One head of size one, three keys 0, ln 2, ln 3 and values 1, 10, 100; the query is 1.
KEYS = torch.tensor([0.0, math.log(2), math.log(3)], dtype=torch.float64).view(3, 1, 1)
VALUES = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(3, 1, 1)


@pytest.mark.parametrize(
    ("options", "numerator", "denominator"),
    [
        ({}, 1 * 1 + 2 * 10 + 3 * 100, 1 + 2 + 3),
        ({"sliding_window": 2}, 2 * 10 + 3 * 100, 2 + 3),
        ({"sliding_window": 1}, 3 * 100, 3),
        ({"sliding_window": 0}, 321, 6),
        ({"sinks": torch.tensor([math.log(4)])}, 321, 6 + 4),
        ({"sinks": torch.tensor([math.log(4)]), "sliding_window": 1}, 300, 3 + 4),
        ({"attention_chunk": 3}, 321, 6),
        ({"attention_chunk": 2}, 300, 3),
        ({"alibi_slopes": torch.tensor([math.log(2)])}, 1 / 4 + 20 / 2 + 300, 1 / 4 + 2 / 2 + 3),
    ],
    ids=[
        "plain",
        "window 2",
        "window 1",
        "window 0",
        "sink",
        "sink, window 1",
        "chunk of all",
        "new chunk",
        "alibi",
    ],
)
def test_by_hand(options: dict[str, object], numerator: float, denominator: float) -> None:
    result = dense_attention(torch.ones(1, 1, 1), KEYS, VALUES, scale=1.0, **options)  # type: ignore[arg-type]
    assert result.output.item() == pytest.approx(numerator / denominator, rel=1e-6)
    assert result.lse.item() == pytest.approx(math.log(denominator), rel=1e-6)


def test_soft_cap_by_hand() -> None:
    result = dense_attention(torch.ones(1, 1, 1), KEYS, VALUES, scale=1.0, soft_cap=0.5)
    weights = [math.exp(0.5 * math.tanh(k / 0.5)) for k in KEYS.flatten().tolist()]
    expected = (weights[0] + 10 * weights[1] + 100 * weights[2]) / sum(weights)
    assert result.output.item() == pytest.approx(expected, rel=1e-12)


def test_new_tokens_are_the_last_ones() -> None:
    out = dense_attention(torch.zeros(2, 1, 1), KEYS, VALUES, scale=1.0).output
    assert out.flatten().tolist() == pytest.approx([(1 + 10) / 2, (1 + 10 + 100) / 3])


def test_a_row_without_keys_is_zero_and_not_nan() -> None:
    """More new tokens than keys: the first stands before every key."""
    result = dense_attention(torch.ones(4, 1, 1), KEYS, VALUES, scale=1.0)
    assert result.output[0].item() == 0.0
    assert result.lse[0].item() == -math.inf
    assert result.output[1].item() == 1.0
