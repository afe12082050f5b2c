"""Moving experts between ranks: which weights go where, and the exchange itself.

All ranks derive the same order of exchanges from the same two arrangements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.parallel import Communicator

Places = Sequence[Sequence[int]]
"""By rank, the expert in each of its slots."""


class Sending(NamedTuple):
    """One rank gives an expert to others."""

    expert: int
    source: int
    """The lowest rank that has it."""
    targets: tuple[int, ...]
    """Ranks that are to have it and do not, ascending."""


def sendings(old: Places, new: Places) -> list[Sending]:
    """What ranks must give each other, by expert.

    Raises:
        ValueError: an expert that is wanted is nowhere.
    """
    found = []
    for expert in sorted({expert for slots in new for expert in slots}):
        holders = [rank for rank, slots in enumerate(old) if expert in slots]
        if not holders:
            raise ValueError(f"expert {expert} is on no rank")
        targets = tuple(
            rank for rank, slots in enumerate(new) if expert in slots and rank not in holders
        )
        if targets:
            found.append(Sending(expert, holders[0], targets))
    return found


def move_experts(
    old: Places, new: Places, slots: Sequence[Sequence[Tensor]], group: Communicator
) -> None:
    """Exchange weights, so that this rank's slots hold the experts of the new arrangement.

    Arguments as :func:`receive_experts`'s; the slots are written in place.
    """
    put_experts(slots, receive_experts(old, new, slots, group))


def receive_experts(
    old: Places, new: Places, slots: Sequence[Sequence[Tensor]], group: Communicator
) -> dict[int, Tensor]:
    """Exchange weights with the other ranks; the slots are read only.

    Every rank must call it with the same arrangements. Needs memory for the experts that this rank gets, of
    one mixture.

    Args:
        slots: weights of the expert in each of this rank's slots: contiguous tensors, of shapes and dtypes
            that are the same for all experts and ranks.

    Returns:
        Bytes of the weights by the slot that is to hold them; slots that stay are not among them.
    """
    rank = group.rank
    wanted = {e for e, before in zip(new[rank], old[rank], strict=True) if e != before}
    arrived: dict[int, Tensor] = {
        expert: _packed(slots[old[rank].index(expert)]) for expert in wanted & set(old[rank])
    }
    size = sum(tensor.nbytes for tensor in slots[0])
    for expert, source, targets in sendings(old, new):
        if rank == source:
            data = _packed(slots[old[rank].index(expert)])
        else:
            data = torch.empty(size, dtype=torch.uint8)
        data = group.broadcast(data, source)
        if rank in targets:
            arrived[expert] = data
    pairs = enumerate(zip(old[rank], new[rank], strict=True))
    return {slot: arrived[after] for slot, (before, after) in pairs if before != after}


def put_experts(slots: Sequence[Sequence[Tensor]], arrived: Mapping[int, Tensor]) -> None:
    """Overwrite slots with what :func:`receive_experts` gave."""
    for slot, data in arrived.items():
        _write(slots[slot], data)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all bytes, one tensor after the other."""
    return torch.cat([_bytes(tensor) for tensor in tensors])


def _write(tensors: Sequence[Tensor], data: Tensor) -> None:
    start = 0
    for tensor in tensors:
        _bytes(tensor).copy_(data[start : start + tensor.nbytes])
        start += tensor.nbytes


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as bytes."""
    return tensor.view(-1).view(torch.uint8)


def are_alike(slots: Sequence[Sequence[Tensor]], group: Communicator) -> bool:
    """True on every rank if the weights of all experts on all ranks have the same sizes. Every rank must
    call it."""
    sizes = [[tensor.nbytes for tensor in tensors] for tensors in slots]
    first = sizes[0]
    own = torch.tensor(
        [len(first), int(all(each == first for each in sizes)), *_sums(first)], dtype=torch.int64
    )
    every = group.all_gather(own[None], 0)
    return bool((every[:, 1] == 1).all()) and bool((every == every[0]).all())


def _sums(sizes: Sequence[int]) -> tuple[int, int]:
    """Two numbers that differ where sizes do, of any count of them."""
    return sum(sizes), sum((at + 1) * size for at, size in enumerate(sizes))
