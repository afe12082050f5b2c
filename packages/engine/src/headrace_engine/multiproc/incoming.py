"""What rank 0 says, as another rank reads it: whole frames from one connection, with few calls of the system.

A rank that sleeps must be woken for a pass, which takes longer than anything else on its way. So it looks
for a pass without sleeping for a while when it has done one, and for longer when rank 0 has said that one is
about to come (:data:`EXPECT`): it has time to wake up while rank 0 makes the batch.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from headrace_engine.multiproc.frames import unpack
from headrace_engine.multiproc.pass_frames import PassDecoder

LENGTHS = struct.Struct("<QQ")
PASS = (1 << 64) - 1
"""In place of the length of a frame's tree: the frame is a pass (:mod:`.pass_frames`)."""
EXPECT = LENGTHS.pack((1 << 64) - 2, 0)
"""A frame that says only that a pass is about to come."""
SPIN_SECONDS = 50e-6
"""How long a rank looks for the next frame before it sleeps, as the ranks' groups do."""
EXPECT_SECONDS = 2e-3
"""Likewise, once a pass is about to come."""
_ROOM = 1 << 17


def pass_pieces(body: bytes) -> list[bytes | memoryview]:
    """A frame of an encoded pass, in pieces that are to be sent one after the other."""
    return [LENGTHS.pack(PASS, len(body)) + body]


class Incoming:
    """Frames of one connection. One thread.

    Args:
        connection: read by nobody else.
        spins: look for a frame before sleeping, as every rank of this host has a core.
    """

    def __init__(self, connection: socket.socket, *, spins: bool = False) -> None:
        self._connection, self._spins = connection, spins
        self._passes = PassDecoder()
        self._buffer = memoryview(bytearray(_ROOM))
        self._begin = self._end = 0
        """Where bytes lie that have come and are not read."""
        self._waits = SPIN_SECONDS
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def receive(self) -> Any:
        """The next frame's value.

        Raises:
            EOFError: the other side is gone.
            OSError: of the connection.
            BadFrame: it is none.
        """
        while True:
            tree_size, data_size = LENGTHS.unpack(self._take(LENGTHS.size))
            if tree_size == PASS:
                self._waits = SPIN_SECONDS
                return self._passes.decode(self._take(data_size))
            if tree_size == PASS - 1:
                self._waits = EXPECT_SECONDS
                continue
            return unpack(bytes(self._take(tree_size)), self._take(data_size))

    def _take(self, size: int) -> bytearray:
        """The next bytes."""
        have = self._end - self._begin
        if have < size <= _ROOM:
            self._fill(size)
        elif have < size:
            return self._take_large(size, have)
        begin = self._begin
        self._begin = begin + size
        return bytearray(self._buffer[begin : begin + size])

    def _take_large(self, size: int, have: int) -> bytearray:
        data = bytearray(size)
        data[:have] = self._buffer[self._begin : self._end]
        self._begin = self._end = 0
        left = memoryview(data)[have:]
        while left:
            count = self._connection.recv_into(left)
            if not count:
                raise EOFError("the connection is closed")
            left = left[count:]
        return data

    def _fill(self, size: int) -> None:
        """Have so many bytes in the buffer, and whatever else has come."""
        buffer, have = self._buffer, self._end - self._begin
        buffer[:have] = buffer[self._begin : self._end]
        self._begin, self._end = 0, have
        if self._spins and not have:
            self._look()
        while self._end < size:
            count = self._connection.recv_into(buffer[self._end :])
            if not count:
                raise EOFError("the connection is closed")
            self._end += count

    def _look(self) -> None:
        """Return when there is something to read, or it is time to sleep."""
        until = time.perf_counter() + self._waits
        self._waits = SPIN_SECONDS
        while not self._readable.poll(0) and time.perf_counter() < until:
            pass
