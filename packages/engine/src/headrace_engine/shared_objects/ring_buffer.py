"""A ring of chunks in shared memory that one process writes and others read.

The memory has no name in any file system: readers open it by the writer's process and descriptor, and it is
gone with the last process that has it mapped, however that one ends. It is reserved as the writer first
comes by, so that a full memory is an error of :meth:`SingleWriterShmRingBuffer.allocate_buf`, not a signal.

A chunk is an id and the payload's size, 4 bytes each, and the payload. Ids tell a reader that an address has
been used again. What is allocated and what is free only the writer knows.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

HEADER = 8
"""Bytes before a chunk's payload."""
ALIGNMENT = 8
_HEAD = struct.Struct("=II")
_MOST_IDS = 1 << 32
NAME_VARIABLE = "HEADRACE_OBJECT_STORAGE_SHM_BUFFER_NAME"
"""Environment variable: the memory's name in ``/proc/PID/maps``."""


class RingHandle(NamedTuple):
    """How another process of this user opens a ring."""

    pid: int
    descriptor: int
    size: int


class _Chunk(NamedTuple):
    start: int
    """Its place, counted over all rounds of the ring."""
    payload_size: int


class SingleWriterShmRingBuffer:
    """The writer's or a reader's end; see :meth:`create` and :meth:`open`. A writer uses it from one thread.

    Args:
        descriptor: of the memory.
        size: of the memory; a multiple of :data:`ALIGNMENT`.
        is_writer: there is one.
    """

    def __init__(self, descriptor: int, size: int, *, is_writer: bool) -> None:
        self._descriptor, self.size, self.is_writer = descriptor, size, is_writer
        self._memory = mmap.mmap(descriptor, size)
        self._view = memoryview(self._memory)
        self._chunks: dict[int, _Chunk] = {}
        self.monotonic_id_start = self.monotonic_id_end = 0
        """Ids of live chunks: from the first to before the second, modulo 2**32."""
        self.data_buffer_start = self.data_buffer_end = 0
        """Places of live chunks, counted over all rounds."""
        self._reserved = 0

    @classmethod
    def create(cls, size: int) -> SingleWriterShmRingBuffer:
        """New memory, for its writer.

        Raises:
            OSError: the system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("shared memory without a name is of Linux only")
        size -= size % ALIGNMENT
        descriptor = os.memfd_create(os.environ.get(NAME_VARIABLE) or "headrace-objects")
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size, is_writer=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, handle: RingHandle) -> SingleWriterShmRingBuffer:
        """A writer's memory, for a reader.

        Raises:
            OSError: the writer is gone, or another user's.
        """
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), handle.size, is_writer=False)

    def handle(self) -> RingHandle:
        """For :meth:`open` in other processes, as long as the writer has not closed it."""
        return RingHandle(os.getpid(), self._descriptor, self.size)

    def allocate_buf(self, size: int) -> tuple[int, int]:
        """A chunk with room for a payload. Writers only.

        Returns:
            Its address and its id.

        Raises:
            MemoryError: no contiguous room is free, or the system has no memory for it.
        """
        whole = -(-(HEADER + size) // ALIGNMENT) * ALIGNMENT
        start = self.data_buffer_end
        if start % self.size + whole > self.size:  # chunks are contiguous: a gap stays at the end
            start += self.size - start % self.size
        if not self._chunks:
            self.data_buffer_start = start
        if start + whole - self.data_buffer_start > self.size:
            raise MemoryError(
                f"{size} bytes: the ring of {self.size} has no contiguous room for them"
            )
        address, chunk_id = start % self.size, self.monotonic_id_end
        self._reserve(address + whole)
        _HEAD.pack_into(self._view, address, chunk_id, size)
        self._chunks[chunk_id] = _Chunk(start, size)
        self.monotonic_id_end = (chunk_id + 1) % _MOST_IDS
        self.data_buffer_end = start + whole
        return address, chunk_id

    def _reserve(self, end: int) -> None:
        """Have memory behind the ring's first bytes. Without, a write would end the process."""
        if end <= self._reserved:
            return
        try:
            os.posix_fallocate(self._descriptor, self._reserved, end - self._reserved)
        except OSError as error:
            raise MemoryError(f"shared memory: {error.strerror}") from error
        self._reserved = end

    @contextmanager
    def access_buf(self, address: int) -> Iterator[tuple[memoryview, int, int]]:
        """(payload, id, payload's size) of the chunk at an address, whose bytes may be another's by now.

        Raises:
            ValueError: no chunk can be there.
        """
        if not 0 <= address <= self.size - HEADER:
            raise ValueError(f"address = {address}: outside of the ring of {self.size} bytes")
        chunk_id, size = _HEAD.unpack_from(self._view, address)
        first = address + HEADER
        if first + size > self.size:
            raise ValueError(f"address = {address}: no chunk begins there")
        with self._view[first : first + size] as payload:
            yield payload, chunk_id, size

    def free_buf(
        self, is_free: Callable[[int, memoryview], bool], num_bytes: int | None = None
    ) -> list[int]:
        """Free the oldest chunks, up to the first that is in use. Writers only.

        Args:
            is_free: (id, payload) -> nobody needs it.
            num_bytes: enough; None: as many as possible.

        Returns:
            Ids of freed chunks, oldest first. Their room may be at the ring's end and its beginning.
        """
        freed: list[int] = []
        wanted = self.size if num_bytes is None else num_bytes
        begin = self.data_buffer_start
        while self._chunks and self.data_buffer_start - begin < wanted:
            oldest = self.monotonic_id_start
            with self.access_buf(self._chunks[oldest].start % self.size) as (payload, _, _):
                if not is_free(oldest, payload):
                    break
            del self._chunks[oldest]
            freed.append(oldest)
            self.monotonic_id_start = (oldest + 1) % _MOST_IDS
            following = self._chunks.get(self.monotonic_id_start)
            self.data_buffer_start = self.data_buffer_end if following is None else following.start
        return freed

    def clear(self) -> None:
        """Free all chunks, whoever needs them. Writers only."""
        self.free_buf(lambda chunk_id, payload: True)

    def close(self) -> None:
        """Unmap the memory; a writer's is gone once no reader has it. Idempotent."""
        if self._memory.closed:
            return
        self._view.release()
        self._memory.close()
        os.close(self._descriptor)
