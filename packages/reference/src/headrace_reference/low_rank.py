"""``low_rank``: what each row's own adapter adds to a linear layer's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """Memory for the adapters of one layer."""

    down: Tensor
    """[S, P, max_rank, K]; beyond a part's rank nothing is read."""
    up: Tensor
    """[S, N, max_rank], the parts' rows behind each other."""
    parts: tuple[int, ...]
    """Outputs of each part."""
    ranks: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (slot, part); those that are not here are empty."""
    scales: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return (self.down.numel() + self.up.numel()) * self.down.element_size()

    def outputs_of(self, part: int) -> slice:
        """Where the part lies among N."""
        begin = sum(self.parts[:part])
        return slice(begin, begin + self.parts[part])


class LowRank:
    """See :class:`headrace_core.ops.optional.low_rank.LowRankOp`."""

    def allocate(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_parts: Sequence[int],
        like: Tensor,
    ) -> LowRankFactors:
        return LowRankFactors(
            unset_like(like, num_slots, len(out_parts), max_rank, in_features),
            unset_like(like, num_slots, sum(out_parts), max_rank),
            tuple(out_parts),
        )

    def write(
        self, factors: LowRankFactors, slot: int, part: int, down: Tensor, up: Tensor, scale: float
    ) -> None:
        check_place(factors, slot, part)
        rank = checked_rank(factors, part, down, up)
        factors.down[slot, part, :rank] = down
        factors.up[slot, factors.outputs_of(part), :rank] = up
        factors.ranks[slot, part], factors.scales[slot, part] = rank, scale

    def __call__(self, out: Tensor, x: Tensor, factors: LowRankFactors, slots: Tensor) -> Tensor:
        check_rows(out, x, factors, slots)
        chosen = slots[: x.shape[0]]
        for slot in sorted(set(chosen.tolist()) - {-1}):
            if not 0 <= slot < factors.down.shape[0]:
                raise IndexError(f"low_rank: slot {slot} is outside [-1, {factors.down.shape[0]})")
            add_adapter(out, x, factors, slot, chosen == slot)
        return out


class _FakeLowRank(LowRank):
    def write(
        self, factors: LowRankFactors, slot: int, part: int, down: Tensor, up: Tensor, scale: float
    ) -> None:
        check_place(factors, slot, part)
        checked_rank(factors, part, down, up)

    def __call__(self, out: Tensor, x: Tensor, factors: LowRankFactors, slots: Tensor) -> Tensor:
        return unset_like(out)


def add_adapter(out: Tensor, x: Tensor, factors: LowRankFactors, slot: int, rows: Tensor) -> None:
    """Add what one slot's adapter makes of the rows that ``rows`` [T] bool marks."""
    for part in range(len(factors.parts)):
        rank, where = factors.ranks.get((slot, part), 0), factors.outputs_of(part)
        if not rank:
            continue
        inner = widened(x[rows]) @ widened(factors.down[slot, part, :rank]).T
        added = inner * factors.scales[slot, part] @ widened(factors.up[slot, where, :rank]).T
        out[rows, where] = (widened(out[rows, where]) + added).to(out.dtype)


def check_place(factors: LowRankFactors, slot: int, part: int) -> None:
    """
    Raises:
        IndexError: there is no such slot or part.
    """
    for name, value, count in (
        ("slot", slot, factors.down.shape[0]),
        ("part", part, len(factors.parts)),
    ):
        if not 0 <= value < count:
            raise IndexError(f"low_rank: {name} {value} is outside [0, {count})")


def checked_rank(factors: LowRankFactors, part: int, down: Tensor, up: Tensor) -> int:
    """The rank of two factors.

    Raises:
        ValueError: they do not fit each other, the layer, or the memory.
    """
    _, _, max_rank, inputs = factors.down.shape
    rank, outputs = down.shape[0], factors.parts[part]
    if tuple(down.shape) != (rank, inputs) or tuple(up.shape) != (outputs, rank):
        raise ValueError(
            f"low_rank: down is {list(down.shape)} and up {list(up.shape)}; for part {part} they must "
            f"be [r, {inputs}] and [{outputs}, r]"
        )
    if rank > max_rank:
        raise ValueError(f"low_rank: rank {rank} is above max_rank = {max_rank}")
    return rank


def check_rows(out: Tensor, x: Tensor, factors: LowRankFactors, slots: Tensor) -> None:
    """
    Raises:
        ValueError: a shape or dtype is not the layer's.
    """
    (rows, inputs), outputs = (x.shape[0], factors.down.shape[3]), sum(factors.parts)
    same = out.dtype == x.dtype == factors.down.dtype
    if not same or tuple(x.shape) != (rows, inputs) or tuple(out.shape) != (rows, outputs):
        raise ValueError(
            f"low_rank: out is {out.dtype} {list(out.shape)} and x {x.dtype} {list(x.shape)}; they must "
            f"be {factors.down.dtype} [T, {outputs}] and [T, {inputs}]"
        )
    if slots.dtype != torch.int32 or slots.dim() != 1 or slots.shape[0] < rows:
        raise ValueError(
            f"low_rank: slots are {slots.dtype} {list(slots.shape)}; they must be int32, {rows} or more"
        )


low_rank = LowRank()
fake_low_rank = _FakeLowRank()
