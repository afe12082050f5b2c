"""Collective communication, and the one-process default that every package can be tested with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Communicator(ABC):
    """A group of ranks that hold shards of one model (tensor parallel axis).

    Every rank calls the same methods in the same order with tensors of equal shape and dtype.
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
        """Sum over ranks; may reuse the input's memory."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along ``dim``, rank 0 first."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The source rank's tensor on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    def close(self) -> None:  # noqa: B027 - an optional hook, most have nothing to close
        """Leave the group."""


class SingleProcess(Communicator):
    """A group of one: nothing to communicate."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None


def shard(size: int, communicator: Communicator, *, what: str) -> int:
    """``size / world_size``.

    Raises:
        ValueError: it does not divide; names ``what``.
    """
    if size % communicator.world_size:
        raise ValueError(
            f"{what} = {size} cannot be divided over tensor_parallel_size = "
            f"{communicator.world_size}"
        )
    return size // communicator.world_size
