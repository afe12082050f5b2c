"""A host that has joined, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

from headrace_engine.multiproc import frames
from headrace_engine.multiproc.messages import Stop
from headrace_engine.multiproc.nodes.messages import NodeEnds, NodeRefused

MOST_BYTES = 1 << 20
"""Of a frame that is not of a rank."""


class JoinedNode:
    """Its own connection, and those of its ranks.

    Args:
        name: its address.
    """

    def __init__(self, node: int, name: str, control: socket.socket) -> None:
        self.node, self.name = node, name
        self.control = control
        self.ranks: dict[int, socket.socket] = {}
        """Connections by rank."""
        self.mirror: socket.socket | None = None
        """For the engine's outputs, if the plan says so."""
        self._reason: str | None = None
        self._gone = False
        self._lock = threading.Lock()

    def tell(self, message: Stop | NodeEnds | NodeRefused) -> None:
        """Send it a message, unless it has gone."""
        with self._lock, contextlib.suppress(OSError):
            frames.send(self.control, frames.pack(message))

    def reason(self, seconds: float) -> str | None:
        """Why it ends, in its own words; None: it says nothing within so many seconds. One thread only."""
        deadline = time.monotonic() + seconds
        while self._reason is None and not self._gone:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.control], [], [], left)[0]:
                break
            try:
                message = frames.receive(self.control, MOST_BYTES)
            except (EOFError, OSError, frames.BadFrame):
                self._gone = True
                self._reason = f"node {self.node} ({self.name}) ended: its connection closed"
                break
            if isinstance(message, NodeEnds):
                self._reason = message.reason
        return self._reason

    def close(self) -> None:
        """Close all its connections."""
        mirror = () if self.mirror is None else (self.mirror,)
        for connection in (self.control, *self.ranks.values(), *mirror):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
