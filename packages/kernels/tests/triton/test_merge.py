"""Merging partial attention results: every cut equals attention in one go."""

from __future__ import annotations

import pytest
import torch

from headrace_kernels.triton.merge import merge_attn_states
from headrace_testing.attention.backends import dense_attention

INF = float("inf")
Part = tuple[torch.Tensor, torch.Tensor]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(first: int, last: int, device: str) -> Part:
    """Attention of 3 queries over keys [first, last) of 7: output [T, H, D], lse [H, T]."""
    key, value = random(7, 4, 20, seed=1)[first:last], random(7, 4, 20, seed=2)[first:last]
    result = dense_attention(random(3, 4, 20), key, value, scale=0.3, causal=False)
    return result.output.float().to(device), result.lse.T.float().contiguous().to(device)


def merged(prefix: Part, suffix: Part) -> Part:
    out, lse = torch.full_like(prefix[0], torch.nan), torch.full_like(prefix[1], torch.nan)
    merge_attn_states(out, *prefix, *suffix, lse)
    return out, lse


@pytest.mark.parametrize("cut", range(8))
def test_every_cut(device: str, cut: int) -> None:
    out, lse = merged(part(0, cut, device), part(cut, 7, device))
    whole, whole_lse = part(0, 7, device)
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-4, rtol=0)


def test_three_parts_in_either_order(device: str) -> None:
    a, b, c = part(0, 2, device), part(2, 5, device), part(5, 7, device)
    left, right = merged(merged(a, b), c), merged(a, merged(b, c))
    torch.testing.assert_close(left[0], right[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(left[1], right[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("empty", [-INF, INF])
def test_a_part_without_keys_is_left_out_whatever_it_holds(device: str, empty: float) -> None:
    whole, lse = part(0, 7, device)
    nothing = torch.full_like(whole, torch.nan), torch.full_like(lse, empty)
    for out, out_lse in (merged(nothing, (whole, lse)), merged((whole, lse), nothing)):
        torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(out_lse, lse, atol=1e-6, rtol=1e-6)
    out, out_lse = merged(nothing, nothing)
    assert out.count_nonzero() == 0
    assert (out_lse == -INF).all()


def test_padded_heads_and_no_lse(device: str) -> None:
    prefix, suffix = part(0, 3, device), part(3, 7, device)
    padded = torch.zeros(3, 4, 32, device=device)
    padded[..., :20] = prefix[0]
    out = torch.zeros(3, 4, 32, device=device)
    merge_attn_states(out[..., :20], padded[..., :20], prefix[1], *suffix)
    torch.testing.assert_close(out[..., :20], part(0, 7, device)[0], atol=1e-5, rtol=1e-5)
    assert out[..., 20:].count_nonzero() == 0
