"""The oracle itself: against torch's SDPA in float64, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from headrace_reference import paged_attention
from headrace_reference.attention import attend, visibility
from headrace_testing.ops import paged_case, wide


def sdpa(query, key, value, scale, window=None):
    """[q, Hq, D] over [L, Hk, D] by torch's own attention."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, value))
    num_q, seq_len = query.shape[0], key.shape[1]
    mask = torch.ones(num_q, seq_len, dtype=torch.bool).tril(seq_len - num_q)
    if window is not None:
        mask &= ~torch.ones(num_q, seq_len, dtype=torch.bool).tril(seq_len - num_q - window)
    out = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, mask, scale=scale)
    return out.transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("num_q", "seq_len"), [(1, 1), (1, 20), (7, 7), (5, 33)])
def test_agrees_with_sdpa(heads, kv_heads, window, num_q, seq_len):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_q, heads, 8, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, seq_len, kv_heads, 8, dtype=torch.float64, generator=generator)
    ours = attend(query, key, value, scale=0.3, sliding_window=window)
    torch.testing.assert_close(ours, sdpa(query, key, value, 0.3, window), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["NHD", "HND", "pair"])
def test_paging_changes_nothing(layout):
    """Gathering by block table gives what contiguous keys give."""
    case = paged_case([(3, 20), (1, 9)], dtype="float64", block_size=8, layout=layout)
    out = case.run(paged_attention)
    for b, (start, end) in enumerate([(0, 3), (3, 4)]):
        length = int(case.seq_lens[b])
        places = torch.arange(length)
        blocks = case.block_table[b].long()[places // 8]
        key, value = case.key_cache[blocks, places % 8], case.value_cache[blocks, places % 8]
        expected = sdpa(case.query[start:end], key, value, case.options["scale"])
        torch.testing.assert_close(out[start:end], expected, rtol=0, atol=1e-12)


def three_tokens(**options):
    """One head of size one; keys 1, 2, 3, values 10, 20, 30; the query 1 stands at each place."""
    ones = torch.ones(3, 1, 1, dtype=torch.float64)
    key = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).reshape(3, 1, 1)
    return attend(ones, key, key * 10, scale=1.0, **options).flatten().tolist()


def weighted(scores, values, extra=()):
    """sum(e^s v) / (sum(e^s) + sum(e^extra))"""
    total = sum(math.exp(s) for s in (*scores, *extra))
    return sum(math.exp(s) * v for s, v in zip(scores, values, strict=True)) / total


def test_three_tokens_causal():
    expected = [10, weighted([1, 2], [10, 20]), weighted([1, 2, 3], [10, 20, 30])]
    assert three_tokens() == pytest.approx(expected, abs=1e-12)


def test_three_tokens_window_counts_the_query_itself():
    expected = [10, weighted([1, 2], [10, 20]), weighted([2, 3], [20, 30])]
    assert three_tokens(sliding_window=2) == pytest.approx(expected, abs=1e-12)
    assert three_tokens(sliding_window=1) == pytest.approx([10, 20, 30], abs=1e-12)


def test_three_tokens_soft_cap():
    capped = [1.5 * math.tanh(s / 1.5) for s in (1, 2, 3)]
    expected = [10, weighted(capped[:2], [10, 20]), weighted(capped, [10, 20, 30])]
    assert three_tokens(soft_cap=1.5) == pytest.approx(expected, abs=1e-12)


def test_three_tokens_sink_takes_weight_and_gives_no_value():
    sinks = torch.tensor([2.0], dtype=torch.float64)
    expected = [
        weighted([1], [10], [2]),
        weighted([1, 2], [10, 20], [2]),
        weighted([1, 2, 3], [10, 20, 30], [2]),
    ]
    assert three_tokens(sinks=sinks) == pytest.approx(expected, abs=1e-12)


def test_soft_cap_of_huge_scores_is_finite():
    query = torch.full((1, 1, 1), 1e4)
    key = torch.tensor([-1.0, 1.0]).reshape(2, 1, 1)
    out = attend(query, key, key, scale=1.0, soft_cap=30.0)
    assert out.item() == pytest.approx(1.0)


def test_visibility():
    assert visibility(2, 4, None, torch.device("cpu")).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert visibility(2, 4, 2, torch.device("cpu")).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]


def test_row_that_sees_nothing_is_zero_even_among_nan():
    """Two new tokens of a context of one stand at -1 and 0."""
    key = torch.full((1, 1, 4), torch.nan)
    out = attend(torch.ones(2, 2, 4), key, key, scale=1.0)
    assert out[0].tolist() == torch.zeros(2, 4).tolist()


@pytest.mark.parametrize("window", [0, -1])
def test_window_of_nothing_is_no_window(window):
    assert three_tokens(sliding_window=window) == three_tokens()


def test_wide_keeps_integers():
    assert wide(torch.tensor([1])).dtype == torch.int64
    assert wide(torch.tensor([1.0])).dtype == torch.float64
