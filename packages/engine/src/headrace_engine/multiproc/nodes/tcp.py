"""Connections between hosts, whose other end is known to have gone within a few seconds."""

from __future__ import annotations

import contextlib
import socket

from headrace_core.errors import ConfigError

IDLE_SECONDS, PROBE_SECONDS, PROBES = 1, 1, 3
"""A silent connection is probed after the first; so many unanswered probes end it."""
SILENCE_SECONDS = 4.0
"""Longest time until sent bytes are acknowledged. A process that is stopped is not silent: its kernel
answers."""


def listen(host: str, port: int) -> socket.socket:
    """Listen on one address of this host.

    Args:
        port: 0: any that is free.

    Raises:
        ConfigError: it is not an address of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"parallel.master_addr = {host!r}, master_port = {port}: cannot be listened on: "
            f"{error.strerror}; must be an address of this host, which has node_rank 0, and a free port",
            field="parallel.master_addr",
        ) from error


def watch(connection: socket.socket) -> None:
    """Have a connection end soon after the other host, or the network between, has; where the system can."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_SECONDS), ("TCP_KEEPINTVL", PROBE_SECONDS), ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", int(1000 * SILENCE_SECONDS)),
    ):  # fmt: skip
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def name_of(address: tuple[object, ...] | str) -> str:
    """A peer's address, as ``HOST:PORT``."""
    if isinstance(address, str):
        return address or "?"
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
