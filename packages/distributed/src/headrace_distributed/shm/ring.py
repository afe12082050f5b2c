"""Messages from one process to others of its host, in order, through shared memory (native/src/ring.cpp).

A message is bytes: what they mean is its sender's and receivers' affair. Nothing here is pickled.
"""

from __future__ import annotations

import ctypes
import os
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import NamedTuple

from headrace_core.errors import ConfigError
from headrace_distributed.errors import GroupError, PeerLost, PeerTimeout
from headrace_distributed.shm import library
from headrace_distributed.shm.segment import (
    SegmentHandle,
    create_segment,
    handle_of,
    open_segment,
    parse_handle,
)  # fmt: skip

CAPACITY_BYTES = 4 << 20
"""Of a ring; larger messages go through it in pieces."""
SPIN_SECONDS = 50e-6
"""How long a reader or writer looks before it sleeps."""
_SLICE = 0.2
"""Seconds of a native call that waits: between two, Python runs handlers of signals."""
_MOST_BYTES = 1 << 36
"""Counters of lines wrap around at 2^32; half of that must be more than a ring and a message."""


class RingHandle(NamedTuple):
    """How readers find a ring."""

    segment: SegmentHandle
    num_readers: int
    capacity_bytes: int

    def __str__(self) -> str:
        return f"{self.segment}/{self.num_readers}/{self.capacity_bytes}"


def parse_ring_handle(text: str) -> RingHandle:
    """Read what a handle was written as.

    Raises:
        ValueError: it is none.
    """
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
        raise ValueError(f"{text!r} is not a ring's handle: must be SEGMENT/READERS/CAPACITY")
    return RingHandle(parse_handle(parts[0]), int(parts[1]), int(parts[2]))


class _End(ABC):
    """One end of a ring; a context manager."""

    def __init__(self, descriptor: int, reader: int, handle: RingHandle, spin: float) -> None:
        self.handle = handle
        self._library = library.load()
        self._length = ctypes.c_int64()
        self._ring: int | None = self._library.hr_ring_open(
            descriptor, reader, handle.num_readers, handle.capacity_bytes, int(spin * 1e9)
        )
        if self._ring is None:
            raise library.why_not_opened("the writer" if reader < 0 else f"reader {reader}")

    @abstractmethod
    def close(self) -> None:
        """Leave the ring; the other end notices."""

    def _open(self) -> int:
        if self._ring is None:
            raise GroupError("this end of the ring was closed")
        return self._ring

    def __enter__(self) -> object:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class RingWriter(_End):
    """The end that sends; makes the ring.

    Args:
        num_readers: each must open it, with an index of its own.
        capacity_bytes: a power of two of 64 or more: how far the writer may be ahead of the slowest reader.
        spin_seconds: how long to look for room before sleeping.

    Raises:
        ConfigError: a setting is not what it may be.
        MissingDependency: the native library was not built.
        CapacityError: there is not so much memory.
    """

    def __init__(
        self,
        num_readers: int,
        capacity_bytes: int = CAPACITY_BYTES,
        spin_seconds: float = SPIN_SECONDS,
    ) -> None:
        self._ring = None
        if num_readers < 1:
            raise ConfigError(f"num_readers = {num_readers} must be 1 or more")
        if (
            capacity_bytes < 64
            or capacity_bytes & (capacity_bytes - 1)
            or capacity_bytes > _MOST_BYTES
        ):
            raise ConfigError(
                f"capacity_bytes = {capacity_bytes} must be a power of two from 64 to {_MOST_BYTES}"
            )
        size = library.load().hr_ring_bytes(num_readers, capacity_bytes)
        # Held while the ring is open: readers find it through this descriptor.
        self._descriptor = create_segment("headrace-ring", size)
        handle = RingHandle(handle_of(self._descriptor), num_readers, capacity_bytes)
        super().__init__(self._descriptor, -1, handle, spin_seconds)

    def wait_for_readers(self, timeout: float | None = None) -> None:
        """Wait until every reader has opened the ring. Messages sent before are not lost.

        Raises:
            PeerTimeout: names a reader that has not within ``timeout`` seconds; None: for ever.
            PeerLost: a reader died or left.
        """
        ring, end = self._open(), _end(timeout)
        while (status := self._library.hr_ring_join(ring, _slice(end))) == library.TIMED_OUT:
            if _over(end):
                break
        self._check(status, "opened the ring", timeout)

    def send(self, data: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Send a message to all readers; returns when it is in the ring, which they may not have read yet.

        Raises:
            PeerTimeout: a reader left no room within ``timeout`` seconds, None: for ever; names it. Nothing
            of
                a message that fits into the ring was written; after a larger one the ring is of no use.
            PeerLost: a reader that the ring waits for died or left; names it.
        """
        ring, end = self._open(), _end(timeout)
        size = len(data) if isinstance(data, bytes | bytearray) else data.nbytes
        if size > _MOST_BYTES:
            raise ValueError(f"a message of {size} bytes is more than {_MOST_BYTES}")
        start = _address(data)
        whole = size + 8 > self.handle.capacity_bytes  # what has begun must go on
        while True:
            wait = _nanoseconds(end) if whole else _slice(end)
            status = self._library.hr_ring_send(ring, start, size, wait)
            if status != library.TIMED_OUT or whole or _over(end):
                break
        self._check(status, "made room", timeout)

    def check_readers(self) -> None:
        """Look whether all readers that have joined are there still, without waiting.

        Raises:
            PeerLost: a reader died or left; names it.
        """
        self._check(self._library.hr_ring_look(self._open()), "", None)

    def close(self) -> None:
        """Leave the ring: readers get what was sent, and then an error."""
        if self._ring is not None:
            self._library.hr_ring_close_writer(self._ring)
            os.close(self._descriptor)
        self._ring = None

    def __enter__(self) -> RingWriter:
        return self

    def _check(self, status: int, done: str, timeout: float | None) -> None:
        if status == library.OK:
            return
        reader = self._library.hr_ring_culprit(self._ring)
        if status == library.TIMED_OUT:
            raise PeerTimeout(f"reader {reader} has not {done} within {timeout:g} s", rank=reader)
        fate = "has died" if status == library.DIED else "has left the ring"
        raise PeerLost(f"reader {reader} {fate}", rank=reader)


class RingReader(_End):
    """An end that receives.

    Args:
        handle: of the writer, as text.
        index: of this reader, below the number of readers; each is opened once.

    Raises:
        ValueError: the handle is none, or has no such reader.
        GroupError: the writer is gone.
        MissingDependency: the native library was not built.
    """

    def __init__(self, handle: str, index: int, spin_seconds: float = SPIN_SECONDS) -> None:
        self._ring = None
        found = parse_ring_handle(handle)
        if not 0 <= index < found.num_readers:
            raise ValueError(f"reader {index} must be within 0 and {found.num_readers - 1}")
        size = library.load().hr_ring_bytes(found.num_readers, found.capacity_bytes)
        descriptor = open_segment(found.segment, size)
        try:
            super().__init__(descriptor, index, found, spin_seconds)
        finally:
            os.close(descriptor)

    def receive(self, timeout: float | None = None) -> bytearray:
        """The next message, waited for.

        Raises:
            PeerTimeout: none came within ``timeout`` seconds; None: for ever.
            PeerLost: the writer died or left, and everything that it sent was received.
        """
        ring, end = self._open(), _end(timeout)
        length = ctypes.byref(self._length)
        while True:
            status = self._library.hr_ring_next(ring, length, _slice(end))
            if status != library.TIMED_OUT or _over(end):
                break
        self._check(status, timeout)
        message = bytearray(self._length.value)
        self._check(self._library.hr_ring_take(ring, _address(message), len(message), -1), None)
        return message

    def close(self) -> None:
        """Leave the ring: the writer is told when it next needs room."""
        if self._ring is not None:
            self._library.hr_ring_close_reader(self._ring)
        self._ring = None

    def __enter__(self) -> RingReader:
        return self

    def _check(self, status: int, timeout: float | None) -> None:
        if status == library.OK:
            return
        if status == library.TIMED_OUT:
            raise PeerTimeout(f"no message within {timeout:g} s", rank=None)
        pid = self.handle.segment.pid
        fate = "has died" if status == library.DIED else "has left the ring"
        raise PeerLost(f"the writer (pid {pid}) {fate}", rank=None)


def _end(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _over(end: float | None) -> bool:
    return end is not None and time.monotonic() >= end


def _nanoseconds(end: float | None) -> int:
    return -1 if end is None else max(0, int((end - time.monotonic()) * 1e9))


def _slice(end: float | None) -> int:
    left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
    return max(0, int(left * 1e9))


def _address(data: bytes | bytearray | memoryview) -> object:
    """What ctypes makes a pointer of, without a copy where the memory may be written."""
    if isinstance(data, bytes):
        return data
    if not len(data):
        return None
    view = memoryview(data)
    if view.readonly or not view.contiguous:
        return bytes(view)
    return (ctypes.c_char * view.nbytes).from_buffer(view)
