"""Ways for the bytes of blocks, where they do not come over the control connection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from headrace_distributed.kv_connectors.p2p.arena import Arena

TCP = "tcp"
"""Name of the way of the control connection itself."""


class Piece(NamedTuple):
    """Bytes to be copied from another engine's memory into this one's."""

    ours: int
    """Addresses."""
    theirs: int
    num_bytes: int


class RemoteMemory(ABC):
    """Reads other engines' memory. Its methods may be called from several threads.

    Args:
        arena: registered with the network, to be read and written; held until :meth:`close`.
    """

    name: str

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    @abstractmethod
    def describe(self) -> bytes:
        """What others need to read the arena; they trust it, once its sender has shown the secret."""

    @abstractmethod
    def read(self, description: bytes, pieces: Sequence[Piece], deadline: float) -> None:
        """Copy pieces; returns when nothing will be written to them any more.

        Args:
            description: of the other engine, of :meth:`describe`.
            deadline: time of ``time.monotonic`` after which it should give up.

        Raises:
            OSError: it failed: the pieces hold anything.
            StillWriting: as this, and they may still be written to.
        """

    @abstractmethod
    def close(self) -> None:
        """Unregister. Idempotent."""


class StillWriting(OSError):
    """A transfer failed and cannot be stopped: the memory it goes to must not be used again."""
