"""Adapters of low rank in half precision; in float32 the suite of core has more of them."""

from __future__ import annotations

import pytest
import torch

from headrace_kernels.triton.low_rank import LowRank
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops import bits_equal
from headrace_testing.ops.optional.low_rank import Adapters


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_low_rank(device: str, dtype: str, batch_invariant: bool) -> None:
    """Inputs in two pieces, a rank in two blocks; alone the same bits, if they are to be."""
    adapters = Adapters(1100, (70, 9), 2, dtype, device)
    for slot, part, rank in ((0, 0, 80), (0, 1, 3), (1, 1, 16)):
        adapters.draw(slot, part, rank)
    op, (out, x) = LowRank(batch_invariant=batch_invariant), adapters.rows(19)
    memory, before = adapters.written(op, max_rank=80), out.clone()
    slots = torch.tensor([0, 1, -1] * 6 + [1], dtype=torch.int32, device=device)
    expected = adapters.expected(out, x, slots)
    assert_near(op(out, x, memory, slots), expected, dtype)
    if batch_invariant:
        for rows in (slice(0, 1), slice(17, 19)):
            alone = op(before[rows].clone(), x[rows], memory, slots[rows].clone())
            assert bits_equal(alone, out[rows])


def test_many_rows_take_larger_tiles(device: str) -> None:
    """Each of which meets all adapters."""
    adapters = Adapters(1100, (70,), 2, "float32", device)
    for slot, rank in ((0, 5), (1, 16)):
        adapters.draw(slot, 0, rank)
    (out, x), op = adapters.rows(300), LowRank()
    slots = torch.arange(300, dtype=torch.int32, device=device).remainder(3) - 1
    expected = adapters.expected(out, x, slots)
    assert_near(op(out, x, adapters.written(op, max_rank=16), slots), expected, "float32")
