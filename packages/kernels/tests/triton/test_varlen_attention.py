"""Attention without a cache in the dtypes that core's suite leaves out here, and its invariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace_kernels.triton.varlen_attention import varlen_attention
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops import varlen_case

pytestmark = pytest.mark.keep(4, every_value=False)  # interpreted, a case takes up to seconds

LENGTHS = [1, 5, 0, 64, 33]
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128},
        {"sliding_window": 9, "soft_cap": 3.0, "padding": 3},
        {"reach": 70},
        {"key_lens": (1, 3, 0, 20, 33)},
        {"key_lens": (1, 1, 0, 60, 5), "sliding_window": 9},
    ],
    ids=str,
)


def make(
    dtype: str,
    device: str,
    *,
    reach: int = 0,
    key_lens: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    if key_lens is not None:
        options["key_lens"] = torch.tensor(key_lens, dtype=torch.int32, device=device)
    if reach:
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(4, 2 * reach - 1, generator=generator)
        options["distance_bias"] = bias.to(device)
    return varlen_case(LENGTHS, dtype=dtype, device=device, **options)


@OPTIONS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_against_the_reference(device: str, dtype: str, options: dict[str, Any]) -> None:
    case = make(dtype, device, **options)
    assert_near(case.run(varlen_attention).cpu(), case.expected(), dtype)


@OPTIONS
def test_a_sequence_does_not_depend_on_the_others(device: str, options: dict[str, Any]) -> None:
    case = make("float32", device, **options)
    together, starts = case.run(varlen_attention), case.cu_seqlens.tolist()
    for b in range(len(LENGTHS)):
        alone = case.sequence(b).run(varlen_attention)
        assert torch.equal(alone, together[starts[b] : starts[b + 1]])
