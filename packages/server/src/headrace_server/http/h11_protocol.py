"""uvicorn's HTTP/1.1 protocol with a short way for the pieces of a streamed answer.

A piece that goes through ASGI passes every middleware and h11's state machine, tens of microseconds
for a few bytes, once per token and client. Neither has anything to say about it: a chunked body's
frame is its length (RFC 9112, section 7.1), and h11 keeps no state between two chunks. So the scope of each
request offers :data:`DIRECT`, a function that writes one chunk to the socket; whatever else
happens (head, end, errors, a client that does not read) goes the usual way.

Heads of requests that two servers could read in two ways, which h11 takes, are refused
(:class:`StrictConnection`). Where a proxy and this server do not agree where a request ends, what one
takes for a body is the next request to the other, with whatever rights the proxy gives it ("request
smuggling"). h11 prefers chunks to a length, merges equal lengths, joins folded lines, and takes LF for
CR LF, as RFC 9112 allows; a server that is asked directly loses nothing by refusing them, which the RFC
allows too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_END = re.compile(rb"\n\r?\n")
_ODD_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")
_FRAMING = re.compile(rb"\n(content-length|transfer-encoding)[ \t]*:([^\r\n]*)", re.IGNORECASE)


class StrictConnection(h11.Connection):
    """A server's side of a connection, which refuses ambiguous heads before h11 reads them."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See :meth:`h11.Connection.next_event`.

        Raises:
            h11.RemoteProtocolError: also for what is ambiguous; the connection must be closed.
        """
        if self.their_state is h11.IDLE:
            data, _ = self.trailing_data
            end = _END.search(data)
            problem = _problem(data[: end.end()]) if end is not None else ""
            if problem:
                raise h11.RemoteProtocolError(problem)
        return super().next_event()


def _problem(head: bytes) -> str:
    """The ambiguity in a request's head, its last empty line included; "": there is none."""
    if _ODD_LINE.search(head):
        return "a line is folded, or does not end with CR LF"  # sections 2.2 and 5.2
    framing = [(name.lower(), value) for name, value in _FRAMING.findall(head)]
    if len(framing) > 1:
        return "its length is given more than once"  # section 6.3
    for name, value in framing:
        if name == b"content-length" and b"," in value:
            return "its length is given more than once"
        if name == b"transfer-encoding" and head.partition(b"\r")[0].endswith(b"HTTP/1.0"):
            return "HTTP/1.0 has no chunks"  # section 6.1
    return ""


try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # not a Unix
    ioctl = None  # type: ignore[assignment]

DIRECT = "headrace.direct_write"
"""Key in the scope's ``extensions``; the value is a :data:`DirectWrite`."""

WRITE_BUFFER = 16 * 1024
"""Bytes of answers that wait for one reader in the server; beyond it nothing more is taken from the
engine, which then suspends the request. All of it together stays below the 64 KiB that a slow reader may
cost."""

UNSENT_BYTES = 16 * 1024
"""Bytes that wait for one reader in the system, beyond what its own window lets be sent. Without this the
system takes megabytes of an answer that nobody reads."""

UNTAKEN = "headrace.untaken_bytes"
"""Key in the scope's ``extensions``; the value is a :data:`NumUntaken`."""

NumUntaken = Callable[[], int]
"""Bytes of the connection's answers that its client has not taken. Where the system does not say how many of
those it holds, only the server's are counted."""

DirectWrite = Callable[[bytes], bool]
"""Writes a piece of the body and returns True; False: not now, send it through ASGI."""


def direct_write(scope: Scope) -> DirectWrite | None:
    """The request's short way, None if its server has none."""
    found: DirectWrite | None = scope.get("extensions", {}).get(DIRECT)
    return found


def replace_direct_write(scope: Scope, write: DirectWrite | None) -> None:
    """Put another function in its place, or take it away."""
    extensions: MutableMapping[str, Any] = scope.setdefault("extensions", {})
    if write is None:
        extensions.pop(DIRECT, None)
    else:
        extensions[DIRECT] = write


def num_untaken(scope: Scope) -> NumUntaken | None:
    """The function that tells how much the client has not taken, None if its server does not say."""
    found: NumUntaken | None = scope.get("extensions", {}).get(UNTAKEN)
    return found


class Connections:
    """All open connections of one server, and how many there may be.

    Args:
        most: in all; beyond it a request is answered 503 and its connection closed.
        most_per_peer: of one address; beyond it a connection is closed unread. 0: no limit.
        header_timeout: seconds for a request's head; from the connection's beginning, or from the
            first byte of a further request.
    """

    def __init__(
        self, most: int = 4096, most_per_peer: int = 0, header_timeout: float = 10.0
    ) -> None:
        self.most = most
        self.most_per_peer = most_per_peer
        self.header_timeout = header_timeout
        self.num_open = 0
        self.by_peer: Counter[str] = Counter()

    def enter(self, peer: str | None) -> bool:
        """Count a new connection; False: its peer has too many."""
        self.num_open += 1
        if peer is None:
            return True
        self.by_peer[peer] += 1
        return not self.most_per_peer or self.by_peer[peer] <= self.most_per_peer

    def leave(self, peer: str | None) -> None:
        """A connection has ended."""
        self.num_open -= 1
        if peer is not None:
            self.by_peer[peer] -= 1
            if self.by_peer[peer] <= 0:
                del self.by_peer[peer]


def _whole_answer(status: bytes, kind: bytes, message: bytes) -> bytes:
    """An answer from before there is an application to give one."""
    body = b'{"error":{"message":"%b","type":"%b","param":null,"code":%b}}' % (
        message, kind, status[:3],
    )  # fmt: skip
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
        status, len(body),
    )  # fmt: skip
    return head + b"connection: close\r\n\r\n" + body


_TOO_MANY = _whole_answer(
    b"503 Service Unavailable", b"ServiceUnavailableError", b"too many open connections"
)
_INVALID = _whole_answer(
    b"400 Bad Request", b"BadRequestError", b"the request is not valid HTTP, or ambiguous"
)
_TOO_SLOW = _whole_answer(
    b"408 Request Timeout", b"BadRequestError", b"the request's head did not come in time"
)


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol class for one server, whose connections share these limits."""

    class Limited(Protocol):
        limits = connections

    return Limited


class Protocol(H11Protocol):
    """One connection; see the module's docstring."""

    limits = Connections()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._peer: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        largest = self.config.h11_max_incomplete_event_size
        assert largest is not None, "every server has this limit"
        self.conn = StrictConnection(h11.SERVER, largest)
        self._served: ASGIApp = self.app
        self.app = self._offer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        _limit_unsent(transport.get_extra_info("socket"))
        self._peer = self.client[0] if self.client else None
        if not self.limits.enter(self._peer):
            transport.abort()
        elif self.limits.num_open > self.limits.most:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.leave(self._peer)
        self._stop_timer()
        super().connection_lost(exc)

        # Both lead back to the connection: those of a burst would stay until the collector comes.
        self.app = self._served
        self.cycle = None  # type: ignore[assignment]  # as uvicorn declares it, too

    async def _offer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, which may write directly while it lasts."""
        extensions: MutableMapping[str, Any] = scope.setdefault("extensions", {})
        extensions[UNTAKEN] = self._num_untaken
        # Only here is the body sure to be chunked: HTTP/1.0 knows no chunks, HEAD no body.
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            replace_direct_write(scope, functools.partial(self._write_chunk, self.cycle))
        try:
            await self._served(scope, receive, send)
        finally:
            replace_direct_write(scope, None)
            extensions.pop(UNTAKEN, None)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        # IDLE: what has come is not a whole head yet, or this is the end of the request before.
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Say that the request cannot be read, unless its answer has begun already; then close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_INVALID)
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                self.transport.write(_TOO_SLOW)
            self.transport.close()

    def _stop_timer(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()

    def _write_chunk(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Frame and write. The response's head must have gone out without a content-length."""
        if (
            not data  # an empty chunk would end the body
            or not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _num_untaken(self) -> int:
        found = self.transport.get_write_buffer_size()
        return found + _num_queued(self.transport.get_extra_info("socket"))


def _num_queued(sock: socket.socket | None) -> int:
    """Bytes that wait in the system for a connection's peer to take them; 0 if the system does not say."""
    if sock is None or ioctl is None:
        return 0
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        return int(struct.unpack("i", ioctl(sock.fileno(), TIOCOUTQ, bytes(4)))[0])
    return 0


def _limit_unsent(sock: socket.socket | None) -> None:
    """Have the system say sooner that a reader is behind, where it can (Linux, macOS)."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if sock is None or option is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
