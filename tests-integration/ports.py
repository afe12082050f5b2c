"""Ports side by side, for ranks that listen."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody has now."""
    for first in range(21000, 32000, 7):
        with ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports are free")
