"""HTTP/1.1 to one server: requests go out whole, answers come in as they arrive.

Connections are kept for a while and used again. One that its server has closed meanwhile shows it only when
it is used: such a request is sent again on a fresh connection, which nobody has to know.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

Headers = Sequence[tuple[bytes, bytes]]
READ_BYTES = 64 * 1024
MAX_HEAD = 256 * 1024
"""Most bytes of an answer's head."""
IDLE_SECONDS = 3.0
"""Seconds for which an idle connection is kept: servers close theirs after five."""
MAX_IDLE = 64
STALE_SECONDS = 0.5
"""Seconds within which a connection that was closed while it was idle shows it."""


class UpstreamError(Exception):
    """A server could not be reached, or broke off. The text says what happened, in words for clients."""


class ConnectError(UpstreamError):
    """No connection to the server: nothing of the request has reached it."""


class _Connection:
    """One connection; see the module's docstring."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, MAX_HEAD)
        self.idle_since = 0.0
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """False once it is known that the other side has closed it."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        """Send a whole request."""
        parts = self._http.send(h11.Request(method=method, target=target, headers=list(headers)))
        if body:
            parts = (parts or b"") + (self._http.send(h11.Data(data=body)) or b"")
        end = self._http.send(h11.EndOfMessage())
        self._writer.write((parts or b"") + (end or b""))
        await self._writer.drain()

    async def next(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """The next part of the answer.

        Raises:
            UpstreamError: the connection ended, or what came is not HTTP.
        """
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if self._has_ended:
                    raise UpstreamError("it closed the connection within its answer") from error
                raise UpstreamError(f"it sent what is not HTTP ({error})") from error
            if isinstance(event, h11.Response | h11.Data | h11.EndOfMessage):
                return event
            if event is h11.NEED_DATA:
                try:
                    data = await self._reader.read(READ_BYTES)
                except OSError as error:
                    raise UpstreamError(f"its connection broke ({_reason(error)})") from error
                self._has_ended = not data
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise UpstreamError("it closed the connection before its answer")
                self._http.receive_data(data)
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise UpstreamError("it closed the connection before its answer")

    def renew(self) -> bool:
        """Make ready for another request; False: it must be closed."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self.idle_since = time.monotonic()
        return self.is_open

    def close(self) -> None:
        """Close at once; who waits for more of its answer is told."""
        self._writer.transport.abort()


class UpstreamAnswer:
    """An answer whose head has come. Must be closed."""

    def __init__(self, upstream: Upstream, connection: _Connection, head: h11.Response) -> None:
        self.status: int = head.status_code
        self.headers: list[tuple[bytes, bytes]] = [(bytes(k), bytes(v)) for k, v in head.headers]
        """Names in lower case."""
        self._upstream = upstream
        self._connection = connection

    def header(self, name: bytes) -> bytes:
        """The value of a header, b"" if it is absent."""
        return next((value for key, value in self.headers if key == name), b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            UpstreamError: the server broke off.
        """
        while True:
            event = await self._connection.next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def read(self, most: int) -> bytes:
        """The whole body.

        Raises:
            UpstreamError: the server broke off, or it has more bytes than ``most``.
        """
        body = b""
        async for piece in self.pieces():
            body += piece
            if len(body) > most:
                raise UpstreamError(f"its answer has more than {most} bytes")
        return body

    def close(self) -> None:
        """Give the connection back, or end it if the answer is not whole: the server stops working then."""
        self._upstream.take_back(self._connection)


class Target(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    authority: bytes
    """As in the header ``Host``."""
    base: bytes
    """Path before all paths, without a slash at its end."""
    tls: bool

    @classmethod
    def of(cls, url: str) -> Target:
        """From a URL."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        base = parts.path.rstrip("/").encode()
        return cls(parts.hostname or "", port, parts.netloc.rpartition("@")[2].encode(), base, tls)


class Upstream:
    """Connections to one server.

    Args:
        url: of the server.
        connect_timeout: seconds for a connection.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        self._target = Target.of(url)
        self._connect_timeout = connect_timeout
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._tls = ssl.create_default_context() if self._target.tls else None

    async def request(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> UpstreamAnswer:
        """Send a request and wait for the head of its answer.

        Args:
            target: path and query.
            headers: without ``Host`` and ``Content-Length``.

        Raises:
            ConnectError: no connection.
            UpstreamError: the server broke off before the head was whole.
        """
        own = [(b"host", self._target.authority)]
        if body or method in ("POST", "PUT", "PATCH"):
            own.append((b"content-length", str(len(body)).encode()))
        path = self._target.base + target
        while (connection := self._from_idle()) is not None:
            sent_at = time.monotonic()
            try:
                return await self._exchange(connection, method, path, [*own, *headers], body)
            except UpstreamError:
                if time.monotonic() - sent_at > STALE_SECONDS:
                    raise  # it was at work on this: not one that was closed while it was idle
        connection = await self._connected()
        return await self._exchange(connection, method, path, [*own, *headers], body)

    def take_back(self, connection: _Connection) -> None:
        """Keep a connection for another request, if its answer is whole."""
        self._busy.discard(connection)
        if connection.renew() and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def break_off(self) -> None:
        """Close all connections: the server is gone, and who waits for it must not wait longer."""
        for connection in list(self._busy):
            connection.close()
        self.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(
        self, connection: _Connection, method: str, path: bytes, headers: Headers, body: bytes
    ) -> UpstreamAnswer:
        self._busy.add(connection)
        try:
            await connection.send(method, path, headers, body)
            head = await connection.next()
        except BaseException as error:
            self._busy.discard(connection)
            connection.close()
            if isinstance(error, OSError):
                raise UpstreamError(f"its connection broke ({_reason(error)})") from error
            raise
        assert isinstance(head, h11.Response)
        return UpstreamAnswer(self, connection, head)

    def _from_idle(self) -> _Connection | None:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connected(self) -> _Connection:
        target = self._target
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(
                    target.host, target.port, ssl=self._tls, limit=READ_BYTES
                )
        except TimeoutError as error:
            raise ConnectError(f"no connection within {self._connect_timeout:g} s") from error
        except OSError as error:
            raise ConnectError(f"no connection ({_reason(error)})") from error
        return _Connection(reader, writer)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
