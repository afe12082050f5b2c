"""Blocks in memory, for this engine and for others: bounded in bytes and in time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from headrace_distributed.kv_connectors.p2p.arena import Arena

DIGEST_BYTES = 32


class NoRoom(OSError):
    """The store cannot take a block."""


@dataclass(slots=True, eq=False)
class Slot:
    """A piece of the store's memory with one block."""

    start: int
    num_bytes: int
    expires: float = 0.0
    num_pins: int = 0
    """Readers, whom its memory must outlive."""
    is_gone: bool = False
    """Found no more: its memory goes with the last reader."""
    was_fetched: bool = False
    """Another engine's: it goes once the engine has loaded it."""
    digest: bytes = b""


class BlockStore:
    """Blocks by key; those that were used longest ago make room. Thread-safe.

    Args:
        num_bytes: of memory.
        seconds: after its last use a block is forgotten.
        clock: monotonic seconds.
    """

    def __init__(
        self, num_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.arena = Arena(num_bytes)
        self._seconds, self._clock = seconds, clock
        self._slots: OrderedDict[bytes, Slot] = OrderedDict()
        """In the order of use, and so of their ends."""
        self._lock = threading.Lock()

    def contains(self, key: bytes) -> bool:
        """True if a block is there; it counts as used."""
        with self._lock:
            return self._used(key) is not None

    def save(self, key: bytes, content: memoryview) -> None:
        """Keep a copy of a block, if it is not there.

        Raises:
            NoRoom: as :meth:`reserve`.
        """
        if self.contains(key):
            return
        slot = self.reserve(content.nbytes)
        self.view(slot)[:] = content
        self.commit(key, slot)

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a block; False: it is not there, or has another size."""
        slot = self.pin(key)
        if slot is None:
            return False
        try:
            good = slot.num_bytes == into.nbytes
            if good:
                into[:] = self.view(slot)
        finally:
            self.unpin(slot)
        if good and slot.was_fetched:
            self.discard(key)
        return good

    def view(self, slot: Slot) -> memoryview:
        """A slot's bytes."""
        return self.arena.view(slot.start, slot.num_bytes)

    def pin(self, key: bytes) -> Slot | None:
        """A block whose memory stays until :meth:`unpin`; None: there is none."""
        with self._lock:
            slot = self._used(key)
            if slot is not None:
                slot.num_pins += 1
            return slot

    def unpin(self, slot: Slot) -> None:
        """A reader has finished."""
        with self._lock:
            slot.num_pins -= 1
            self._free(slot)

    def digest(self, key: bytes, slot: Slot) -> bytes:
        """BLAKE2b-256 (RFC 7693) over key and content of a pinned block, computed once."""
        if not slot.digest:
            slot.digest = digest_of(key, self.view(slot))
        return slot.digest

    def reserve(self, num_bytes: int) -> Slot:
        """Memory that somebody writes a block to.

        Raises:
            NoRoom: it is too large, or all blocks are being read.
        """
        with self._lock:
            self._forget_old()
            start = self.arena.take(num_bytes)
            may_fit = start is None and num_bytes <= self.arena.num_bytes
            for key, old in list(self._slots.items()) if may_fit else ():
                if old.num_pins:
                    continue
                self._drop(key)
                start = self.arena.take(num_bytes)
                if start is not None:
                    break
            if start is None:
                raise NoRoom(
                    f"no room for a block of {num_bytes} bytes: kv_buffer_size is {self.arena.num_bytes}"
                )
            return Slot(start, num_bytes, num_pins=1)

    def commit(self, key: bytes, slot: Slot, *, was_fetched: bool = False) -> None:
        """What :meth:`reserve` gave has been written: it is found from now on."""
        with self._lock:
            slot.num_pins -= 1
            if key in self._slots:
                slot.is_gone = True
            else:
                slot.was_fetched = was_fetched
                slot.expires = self._clock() + self._seconds
                self._slots[key] = slot
            self._free(slot)

    def abandon(self, slot: Slot) -> None:
        """What :meth:`reserve` gave is not needed."""
        slot.is_gone = True
        self.unpin(slot)

    def discard(self, key: bytes) -> None:
        """Forget a block, if it is there."""
        with self._lock:
            self._drop(key)

    def _used(self, key: bytes) -> Slot | None:
        self._forget_old()
        slot = self._slots.get(key)
        if slot is not None:
            slot.expires = self._clock() + self._seconds
            self._slots.move_to_end(key)
        return slot

    def _forget_old(self) -> None:
        now = self._clock()
        while self._slots:
            key, slot = next(iter(self._slots.items()))
            if slot.expires > now:
                return
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            slot.is_gone = True
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.is_gone and not slot.num_pins:
            self.arena.give_back(slot.start, slot.num_bytes)


def digest_of(key: bytes, content: memoryview) -> bytes:
    """BLAKE2b-256 over a key and a block."""
    digest = blake2b(key, digest_size=DIGEST_BYTES)
    digest.update(content)
    return digest.digest()
