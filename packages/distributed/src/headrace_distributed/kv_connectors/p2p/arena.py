"""One stretch of memory out of which blocks are cut, so that it can be registered with a network once."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left

ALIGNMENT = 64
"""Bytes: every piece begins at a multiple."""


class Arena:
    """Hands out pieces; neighbours that are free become one again. Not thread-safe.

    Args:
        num_bytes: of all pieces. The system gives the memory when it is first written.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(ALIGNMENT, num_bytes // ALIGNMENT * ALIGNMENT)
        self._memory = mmap.mmap(-1, self.num_bytes)
        self._view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """Of the first byte."""
        self._starts, self._sizes = [0], {0: self.num_bytes}
        """Of free pieces, in order."""

    @property
    def num_free(self) -> int:
        """Bytes in no piece, which may be scattered."""
        return sum(self._sizes.values())

    def take(self, num_bytes: int) -> int | None:
        """Where a new piece begins; None: there is no room of this size."""
        size = _rounded(num_bytes)
        for index, start in enumerate(self._starts):
            free = self._sizes[start]
            if free < size:
                continue
            del self._sizes[start]
            if free == size:
                del self._starts[index]
            else:
                self._starts[index] = start + size
                self._sizes[start + size] = free - size
            return start
        return None

    def give_back(self, start: int, num_bytes: int) -> None:
        """End a piece of :meth:`take`."""
        size = _rounded(num_bytes)
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(self._starts.pop(index))
        if index and (before := self._starts[index - 1]) + self._sizes[before] == start:
            self._sizes[before] += size
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size

    def view(self, start: int, num_bytes: int) -> memoryview:
        """The bytes of a piece, to read and write."""
        return self._view[start : start + num_bytes]


def _rounded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
