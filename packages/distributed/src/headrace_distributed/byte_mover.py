"""A communicator's operations, made of three that move bytes: what gloo and NCCL have in common.

Sums are taken in the order of ranks, floats of fewer than 32 bits in float32, and rounded once. All ranks
then hold the same bits, a second run gives them again, and a row's sum does not depend on the tensor that it
lies in.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from headrace_core.parallel import Communicator
from headrace_distributed.arguments import check_source, normal_dim

SMALL = 64 << 10
"""Bytes of a tensor up to which every rank gets all tensors and adds them: one exchange instead of two."""


class ByteMover(Communicator):
    """Ranks that exchange bytes; a subclass says how."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @abstractmethod
    def _accepted(self, tensor: Tensor, operation: str) -> Tensor:
        """The tensor itself.

        Raises:
            ValueError: it lies where the ranks' tensors cannot be.
        """

    @abstractmethod
    def _gather(self, found: Tensor, flat: Tensor, operation: str) -> None:
        """found [world_size * n] uint8 = every rank's flat [n] uint8, n > 0."""

    @abstractmethod
    def _exchange(self, found: Tensor, flat: Tensor, operation: str) -> None:
        """found [world_size * n] uint8 = what each rank has for this one in its flat [world_size * n]."""

    @abstractmethod
    def _spread(self, flat: Tensor, source: int, operation: str) -> None:
        """flat [n] uint8 = the source rank's."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        flat = self._accepted(tensor, "all_reduce").contiguous().view(-1)
        if flat.numel() == 0:
            return tensor
        if flat.nbytes <= SMALL:
            return sum_in_order(self._gathered(flat, "all_reduce")).view(tensor.shape)
        part = -(-flat.numel() // self.world_size)
        padded = torch.nn.functional.pad(flat, (0, part * self.world_size - flat.numel()))
        own = sum_in_order(self._exchanged(padded, "all_reduce"))
        return self._gathered(own, "all_reduce").view(-1)[: flat.numel()].view(tensor.shape)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "reduce_scatter", parts=self.world_size)
        shape = list(tensor.shape)
        shape[dim] //= self.world_size
        if tensor.numel() == 0:
            return tensor.new_empty(shape)
        pieces = torch.stack(self._accepted(tensor, "reduce_scatter").chunk(self.world_size, dim))
        return sum_in_order(self._exchanged(pieces.view(-1), "reduce_scatter")).view(shape)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim = normal_dim(tensor, dim, "all_gather")
        flat = self._accepted(tensor, "all_gather").contiguous().view(-1)
        found = self._gathered(flat, "all_gather").view(self.world_size, *tensor.shape)
        return torch.cat(found.unbind(), dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        check_source(source, self.world_size)
        flat = self._accepted(tensor, "broadcast").contiguous().view(-1)
        if flat.numel():
            self._spread(_bytes(flat), source, "broadcast")
        return flat.view(tensor.shape)

    def _gathered(self, flat: Tensor, operation: str) -> Tensor:
        """[world_size, n] of every rank's [n]."""
        found = flat.new_empty(self.world_size, flat.numel())
        if flat.numel():
            self._gather(_bytes(found.view(-1)), _bytes(flat), operation)
        return found

    def _exchanged(self, flat: Tensor, operation: str) -> Tensor:
        """[world_size, n]: what each rank has for this one in its [world_size * n]."""
        found = torch.empty_like(flat)
        self._exchange(_bytes(found), _bytes(flat), operation)
        return found.view(self.world_size, -1)


def sum_in_order(parts: Tensor) -> Tensor:
    """parts [world_size, n] added up, rank 0 first; floats of fewer than 32 bits in float32, rounded
    once."""
    wide = torch.float32 if parts.is_floating_point() and parts.itemsize < 4 else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: libraries know no 1-byte floats, and need to know no dtype."""
    return flat.view(torch.uint8)
