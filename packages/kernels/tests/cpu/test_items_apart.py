"""An item's rows have the same bits alone and beside other items, through what a tower's block with adapters
is made of, at every instruction set: the rows of a call, their number and their place change no other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_kernels.cpu import library
from headrace_kernels.cpu.ops import native_ops

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

HEADS, DIM, INNER, RANK = 2, 16, 40, 4
SIZE = HEADS * DIM
ITEMS = ((16, 16, 16, 4, 4, 4), (8, 8), (60,), (1,), (3, 130))
"""Segments of each item; sizes below, at and beyond the tiles of kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Block:
    """Norm, attention in segments and a gated layer, each product with an adapter.

    Args:
        level: of :func:`headrace_kernels.cpu.library.levels`.
    """

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        kernels = library.load(level)
        kernels.set_num_threads(2)
        self.ops: Any = native_ops(kernels)
        self.generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.norm = self.drawn(SIZE)
        self.parts = {
            "qkv": self.product(SIZE, (SIZE, SIZE, SIZE)),
            "out": self.product(SIZE, (SIZE,)),
            "gate_up": self.product(SIZE, (INNER, INNER)),
            "down": self.product(INNER, (SIZE,)),
        }

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def product(self, inputs: int, outputs: tuple[int, ...]) -> tuple[Any, Tensor, Any]:
        weight = self.drawn(sum(outputs), inputs) / inputs**0.5
        factors = self.ops["low_rank"].allocate(2, RANK, inputs, outputs, weight[:0, :0])
        for slot in range(2):
            for part, size in enumerate(outputs):
                down, up = self.drawn(RANK, inputs) / inputs**0.5, self.drawn(size, RANK)
                self.ops["low_rank"].write(factors, slot, part, down, up, 0.5)
        return self.ops["linear"].pack(weight), self.drawn(sum(outputs)), factors

    def linear(self, name: str, x: Tensor, slot: int) -> Tensor:
        packed, bias, factors = self.parts[name]
        slots = torch.full((len(x),), slot, dtype=torch.int32)
        found: Tensor = self.ops["low_rank"](self.ops["linear"](x, packed, bias), x, factors, slots)
        return found

    def __call__(self, x: Tensor, segments: list[int], slot: int) -> Tensor:
        """x [T, SIZE] -> the same shape."""
        bounds = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
        qkv = self.linear("qkv", self.ops["rms_norm"](x, self.norm, 1e-6), slot)
        query, key, value = (each.view(-1, HEADS, DIM) for each in qkv.split(SIZE, dim=1))
        seen = self.ops["varlen_attention"](
            query, key, value, bounds, max_seqlen=max(segments), scale=DIM**-0.5
        )
        x, stream = self.ops["add_rms_norm"](
            self.linear("out", seen.flatten(1), slot), x.clone(), self.norm, 1e-6
        )
        inner = self.ops["activation_and_mul"](self.linear("gate_up", x, slot), "silu")
        found: Tensor = self.ops["add"](self.linear("down", inner, slot), stream)
        return self.ops["activation"](found, "gelu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_items_do_not_see_each_other(level: str, dtype: torch.dtype) -> None:
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    block = Block(level, dtype)
    items = [block.drawn(sum(sizes), SIZE) for sizes in ITEMS]
    for slot in (-1, 0, 1):
        alone = [block(x, [*sizes], slot) for x, sizes in zip(items, ITEMS, strict=True)]
        for order in ((0, 1), (1, 0), (4, 3, 2, 1, 0), (2, 3, 4), (0, 0, 1, 1)):
            together = block(
                torch.cat([items[i] for i in order]), [n for i in order for n in ITEMS[i]], slot
            )
            counts = [len(items[i]) for i in order]
            for i, rows in zip(order, together.split(counts), strict=True):
                assert torch.equal(rows, alone[i]), (slot, order, i)
