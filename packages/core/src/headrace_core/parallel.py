"""Collective communication, and the one-process default that every package can be tested with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(ABC):
    """A group of ranks that hold shards of one model (tensor parallel axis).

    Every rank calls the same methods in the same order with tensors of equal shape and dtype. A plug-in is
    called with ``(rank, world_size, rendezvous)``, the last an address where the ranks meet
    (``tcp://127.0.0.1:40113/tp``), and returns once all have joined.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process in the group, 0-based."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, the same bits on each; may reuse the input's memory."""

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """This rank's part along ``dim`` of the sum over ranks; ``world_size`` divides that dimension."""
        return self.all_reduce(tensor).chunk(self.world_size, dim)[self.rank].contiguous()

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along ``dim``, rank 0 first."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The source rank's tensor on every rank; may reuse the input's memory."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    def close(self) -> None:  # noqa: B027 - an optional hook, most have nothing to close
        """Leave the group."""


class SingleProcess(Communicator):
    """A group of one: nothing to communicate."""

    rank = 0
    world_size = 1

    def __init__(self, rank: int = 0, world_size: int = 1, rendezvous: str = "") -> None:
        if (rank, world_size) != (0, 1):
            raise ConfigError(f"communicator 'single' has one rank, got {rank} of {world_size}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None
