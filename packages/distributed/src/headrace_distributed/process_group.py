"""Ranks that exchange bytes through a process group of torch: what gloo and torch's NCCL have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions

from headrace_distributed.byte_mover import ByteMover


class ProcessGroupMover(ByteMover):
    """A subclass says how an operation of the group is begun and waited for."""

    @abstractmethod
    def _operate(self, operation: str, begin: Callable[[Any], Any]) -> None:
        """Begin an operation on torch's group, and wait for it.

        Args:
            operation: its name, for errors.
            begin: gets the group, returns torch's ``Work``.

        Raises:
            GroupError: it failed, or this rank has left.
        """

    def _gather(self, found: Tensor, flat: Tensor, operation: str) -> None:
        self._operate(operation, lambda group: group._allgather_base(found, flat))

    def _exchange(self, found: Tensor, flat: Tensor, operation: str) -> None:
        self._operate(operation, lambda group: group.alltoall_base(found, flat, [], []))

    def _spread(self, flat: Tensor, source: int, operation: str) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._operate(operation, lambda group: group.broadcast([flat], options))
