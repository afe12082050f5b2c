"""No connection may leave this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", ""})


@contextmanager
def guarded_sockets() -> Iterator[None]:
    """Fail with an AssertionError on any connect, or send without one, beyond loopback.

    Looking a name up that is not this machine's is refused as well: it asks the network. What was
    tried is reported at the end of the block too, for code that swallows the error.
    """
    tried: list[str] = []

    def check(family: int, address: Any) -> None:
        if family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            tried.append(f"connect to {address!r}")
            raise AssertionError(f"a connection beyond loopback: {address!r}")

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
        if name is not None and not _is_local(name):
            tried.append(f"look-up of {name!r}")
            raise AssertionError(f"a name look-up beyond this machine: {name!r}")
        return _getaddrinfo(host, *args, **kwargs)

    guarded = type(
        "GuardedSocket",
        (socket.socket,),
        {
            "__slots__": (),
            "connect": _checked(socket.socket.connect, check),
            "connect_ex": _checked(socket.socket.connect_ex, check),
        },
    )
    with (
        mock.patch.object(socket, "socket", guarded),
        mock.patch.object(socket, "getaddrinfo", look_up),
    ):
        yield
    assert not tried, f"the network was asked: {'; '.join(tried)}"


_getaddrinfo = socket.getaddrinfo


def _checked(original: Callable[..., Any], check: Callable[[int, Any], None]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        check(self.family, address)
        return original(self, address)

    return connect


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() in _LOCAL_NAMES or host == socket.gethostname()
