"""What rank 0 says, as another rank reads it: whole frames from one connection, with few calls of the system.

A rank that sleeps must be woken for a pass, which takes longer than anything else on its way. So it looks
for a pass without sleeping for a while when it has done one, and for longer when rank 0 has said that one is
about to come (:data:`EXPECT`): it has time to wake up while rank 0 makes the batch, and to rehearse.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from headrace_engine.multiproc.frames import unpack
from headrace_engine.multiproc.pass_decoder import PassDecoder
from headrace_engine.multiproc.pass_frames import PASS

LENGTHS = struct.Struct("<QQ")
EXPECT = LENGTHS.pack(PASS - 1, 0)
"""A frame that says only that a pass is about to come."""
SPIN_SECONDS = 50e-6
"""How long a rank looks for the next frame before it sleeps, as the ranks' groups do."""
EXPECT_SECONDS = 2e-3
"""Likewise, once a pass is about to come."""
_ROOM = 1 << 17


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
        self._expects = False
        """A pass is about to come."""
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
            if self._end - self._begin < LENGTHS.size:
                self._fill(LENGTHS.size)
            tree_size, data_size = LENGTHS.unpack_from(self._buffer, self._begin)
            self._begin += LENGTHS.size
            if tree_size == PASS:
                self._expects = False
                return self._passes.decode(self._take(data_size))
            if tree_size == PASS - 1:
                self._expects = True
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
        if have:
            buffer[:have] = buffer[self._begin : self._end]
        elif self._spins:
            self._look()
        self._begin, self._end = 0, have
        while self._end < size:
            count = self._connection.recv_into(buffer[self._end :])
            if not count:
                raise EOFError("the connection is closed")
            self._end += count

    def _look(self) -> None:
        """Return when there is something to read, or it is time to sleep."""
        is_readable, expects = self._readable.poll, self._expects
        self._expects = False
        if is_readable(0):
            return
        self._passes.prepare(rehearse=expects)
        until = time.perf_counter() + (EXPECT_SECONDS if expects else SPIN_SECONDS)
        while not is_readable(0) and time.perf_counter() < until:
            pass
