"""Experts against the reference in float64, where core's suite does not look."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_kernels.triton.moe import MoE, sort_entries
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops import bits_equal, rand


def test_entries_lie_in_blocks_of_one_expert(device: str) -> None:
    ids = torch.tensor([[3, 0], [3, 1], [3, 0], [0, 3]], device=device)
    where = sort_entries(ids, 5, 2)
    blocks = where.entries.view(-1, 2).tolist()
    used = [(e, b) for e, b in zip(where.experts.tolist(), blocks) if e < 5]
    assert used == [(0, [1, 5]), (0, [6, 8]), (1, [3, 8]), (3, [0, 2]), (3, [4, 7])]


@pytest.mark.parametrize(
    ("counts", "block"), [([7], 4), ([0, 1, 0], 4), ([4, 4], 4), ([1] * 9, 4), ([], 2)]
)
def test_there_are_blocks_enough(device: str, counts: list[int], block: int) -> None:
    experts = max(1, len(counts))
    ids = [e for e, count in enumerate(counts) for _ in range(count)]
    where = sort_entries(
        torch.tensor(ids, dtype=torch.int64, device=device)[:, None], experts, block
    )
    held = [entry for entry in where.entries.tolist() if entry < len(ids)]
    assert sorted(held) == list(range(len(ids)))


def case(rows: int, dtype: str, device: str) -> tuple[Tensor, ...]:
    """x, gate_up, down, both biases, weights and ids: 3 experts, 2 for each row."""
    gate_up, down = rand(3, 2 * 20, 72, dtype=dtype) * 0.1, rand(3, 72, 20, dtype=dtype) * 0.2
    weights, ids = rand(rows, 3, seed=1).softmax(-1).topk(2)
    tensors = (
        rand(rows, 72, dtype=dtype), gate_up, down, rand(3, 40, dtype=dtype),
        rand(3, 72, dtype=dtype), weights, ids,
    )  # fmt: skip
    return tuple(tensor.to(device).contiguous() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 80])
def test_few_and_many_rows_for_each_expert(device: str, rows: int, dtype: str) -> None:
    x, *packed, weights, ids = case(rows, dtype, device)
    op = MoE()
    out = op(x, op.pack(*packed), weights, ids, "clamped_swiglu")
    wide = [tensor.cpu().double() for tensor in (x, *packed)]
    expected = reference.moe(
        wide[0], reference.moe.pack(*wide[1:]), weights.cpu().double(), ids.cpu(), "clamped_swiglu"
    )
    assert_near(out, expected, dtype)


def test_batch_invariant_on_request(device: str) -> None:
    if device == "cpu":
        pytest.skip("numpy, which interprets products, sums a row by its place")
    x, *packed, weights, ids = case(80, "float32", device)
    op = MoE(batch_invariant=True)
    experts = op.pack(*packed)
    whole = op(x, experts, weights, ids, "silu")
    for rows in (slice(3, 4), slice(10, 27)):
        assert bits_equal(op(x[rows], experts, weights[rows], ids[rows], "silu"), whole[rows])


def test_checks_what_it_is_given(device: str) -> None:
    x, gate_up, down, *_, weights, ids = case(2, "float32", device)
    op = MoE()
    with pytest.raises(ConfigError, match=r"down must be \[3, 72, 20\]"):
        op.pack(gate_up, down[:, :-1])
    with pytest.raises(ConfigError, match="'tanh' is unknown"):
        op(x, op.pack(gate_up, down), weights, ids, "tanh")
