"""``low_rank``: what its implementations check alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer, and how many adapters of which rank it has room for."""

    num_slots: int
    max_rank: int
    inputs: int
    parts: tuple[int, ...]
    """Outputs of each of its fused parts."""
    outputs: int
    dtype: torch.dtype

    def check_place(self, slot: int, part: int) -> None:
        """
        Raises:
            IndexError: there is no such slot or part.
        """
        for name, value, count in (
            ("slot", slot, self.num_slots),
            ("part", part, len(self.parts)),
        ):
            if not 0 <= value < count:
                raise IndexError(f"low_rank: {name} {value} is outside [0, {count})")

    def rank_of(self, part: int, down: Tensor, up: Tensor) -> int:
        """The rank of two factors.

        Raises:
            ValueError: they do not fit each other, the layer or the memory.
        """
        rank, outputs = down.shape[0], self.parts[part]
        if down.shape != (rank, self.inputs) or up.shape != (outputs, rank):
            raise ValueError(
                f"low_rank: down is {list(down.shape)} and up {list(up.shape)}; for part {part} they "
                f"must be [r, {self.inputs}] and [{outputs}, r]"
            )
        if rank > self.max_rank:
            raise ValueError(f"low_rank: rank {rank} is above max_rank = {self.max_rank}")
        return rank

    def check_rows(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """
        Raises:
            ValueError: a shape, dtype or stride is not what kernels read and write.
        """
        rows, dtype = x.shape[0], self.dtype
        shapes = out.shape == (rows, self.outputs) and x.shape == (rows, self.inputs)
        if not shapes or out.dtype is not dtype or x.dtype is not dtype or out.stride(1) != 1:
            raise ValueError(
                f"low_rank: out is {out.dtype} {list(out.shape)} with strides {out.stride()}, x "
                f"{x.dtype} {list(x.shape)}; they must be {dtype} [T, {self.outputs}] and [T, "
                f"{self.inputs}], and a row of out in one piece"
            )
        if slots.dtype is not torch.int32 or slots.dim() != 1 or slots.stride(0) != 1:
            raise ValueError(
                f"low_rank: slots are {slots.dtype} {list(slots.shape)} with strides "
                f"{slots.stride()}; they must be int32 [T], one after the other"
            )

    def too_few(self, slots: Tensor, rows: int) -> ValueError:
        """What an op raises that is called with fewer slots than rows."""
        return ValueError(
            f"low_rank: slots are int32 {list(slots.shape)}; of {rows} rows each has one"
        )
