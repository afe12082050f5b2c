"""Latent attention in Triton beyond core's suite: decode cut into segments."""

from __future__ import annotations

import functools

import pytest
import torch

import headrace_reference as reference
from headrace_kernels.triton.mla_attention import mla_attention
from headrace_testing.ops import mla_case


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [3, 40])
def test_split_decode(device: str, dtype: str, heads: int) -> None:
    """More segments than some contexts have tiles; requests without tokens leave theirs alone."""
    lengths = [(1, 3), (1, 40), (0, 7), (1, 129)]
    case = mla_case(lengths, dtype=dtype, device=device, num_heads=heads, padding=2)
    split = case.run(functools.partial(mla_attention, segments=4))
    tolerance = {"float32": 1e-5, "bfloat16": 1.5e-2}[dtype]
    torch.testing.assert_close(
        split.cpu().double(), case.expected(), atol=tolerance, rtol=tolerance
    )


def test_split_decode_of_counted_keys(device: str) -> None:
    """Counts beyond the keys and of none, and the log-sum-exp, over segments that have no keys, too."""
    case = mla_case(
        [(1, 3), (1, 40), (1, 129), (1, 0)], dtype="float32", device=device, num_heads=3
    )
    counts = torch.tensor([5, 17, 0, 0], dtype=torch.int32, device=device)
    lse, expected_lse = (torch.full((4, 3), 7.0, device=device) for _ in range(2))
    arguments, options = case._arguments(), {**case._options(), "key_counts": counts}
    out = mla_attention(*arguments, **options, lse=lse, segments=4)
    expected = reference.mla_attention(*arguments, **options, lse=expected_lse)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
