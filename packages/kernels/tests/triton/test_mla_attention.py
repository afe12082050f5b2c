"""Latent attention in Triton beyond core's suite: decode cut into segments."""

from __future__ import annotations

import functools

import pytest
import torch

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
