"""A streaming HTTP/1.1 client that costs little: the server under test runs on the same cores.

While an answer comes in, all that happens is that each piece of its body is kept with the time of its
arrival. Events are cut and parsed afterwards (:func:`events`), when no server waits for the processor.
See ADR 0012 for what this costs beside general clients.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace_core.errors import ConfigError

MAX_HEAD = 64 * 1024
"""Longest status line and headers that are read, in bytes."""


class HttpError(Exception):
    """The connection failed, or what came is no HTTP."""


class BodyChunk(NamedTuple):
    """Part of a body, as it came."""

    at: float
    """``time.perf_counter`` of its arrival."""
    data: bytes


@dataclass(slots=True)
class HttpResponse:
    """A response, kept as it came."""

    started: float
    """``time.perf_counter`` just before the request was written."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    pieces: list[BodyChunk] = field(default_factory=list)
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        """All pieces together."""
        return b"".join(piece.data for piece in self.pieces)

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            HttpError: it is none.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise HttpError(f"the answer is not valid JSON: {self.body[:200]!r}") from error


def events(pieces: Sequence[BodyChunk]) -> Iterator[tuple[float, bytes]]:
    """The ``data:`` lines of server-sent events, each with the time at which it was complete.

    ``[DONE]`` ends them.
    """
    rest = b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                content = line[5:].strip()
                if content == b"[DONE]":
                    return
                yield at, content


class Client:
    """Requests to one server, over connections that are kept for the next request.

    Args:
        base_url: ``http://host:port`` or ``https://...``, with or without a path in front of every route.
        headers: sent with every request.
        insecure: take any certificate.
        timeout: longest time that one answer may take, in seconds.

    Raises:
        ConfigError: ``base_url`` is no URL of that kind.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        insecure: bool = False,
        timeout: float = 3600.0,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"base URL {base_url!r}: must be http://HOST:PORT or https://HOST:PORT",
                field="base_url",
            )
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._ssl = _tls(insecure) if parts.scheme == "https" else None
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> HttpResponse:
        """``GET`` a path below the base URL."""
        return await self._request(f"GET {self._prefix}{path} HTTP/1.1\r\n", b"")

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """``POST`` JSON to a path below the base URL; returns when the whole answer is there.

        Raises:
            HttpError: no connection, a broken answer, or none within the timeout.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {self._prefix}{path} HTTP/1.1\r\nContent-Type: application/json\r\n{lines}"
        return await self._request(f"{head}Content-Length: {len(body)}\r\n", body)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _request(self, head: str, body: bytes) -> HttpResponse:
        message = f"{head}Host: {self._netloc}\r\n{self._headers}\r\n".encode("latin-1") + body
        try:
            async with asyncio.timeout(self._timeout):
                return await self._exchange(message)
        except TimeoutError:
            raise HttpError(f"no whole answer within {self._timeout:g} s") from None
        except OSError as error:
            raise HttpError(str(error) or type(error).__name__) from error

    async def _exchange(self, message: bytes) -> HttpResponse:
        started = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._over(connection, message, started)
            except _Unused:
                continue  # the server had closed it while it was idle
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return await self._over(connection, message, started)

    async def _over(self, connection: _Connection, message: bytes, started: float) -> HttpResponse:
        try:
            answer = await connection.exchange(message, started)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer


class _Unused(HttpError):
    """The connection ended before a byte of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: HttpResponse | None = None
        self._done: asyncio.Future[HttpResponse] | None = None
        self._head = b""
        self._body: _Chunked | _Counted | None = None
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def exchange(self, message: bytes, started: float) -> asyncio.Future[HttpResponse]:
        """Send a request; the future has the whole answer."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._answer, self._head, self._body = HttpResponse(started), b"", None
        self.reusable = False
        if self._transport.is_closing():
            self._done.set_exception(_Unused("the server closed the connection"))
        else:
            self._transport.write(message)
        return self._done

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        if self._answer is None or self._done is None or self._done.done():
            self.close()  # nobody asked for this
            return
        try:
            if self._body is None:
                data = self._read_head(data)
                if self._body is None:
                    return
            content = self._body.feed(data)
        except ValueError as error:
            self._done.set_exception(HttpError(f"the server's answer is not HTTP: {error}"))
            return
        if content:
            self._answer.pieces.append(BodyChunk(at, content))
        if self._body.complete:
            self._finish(at)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if isinstance(self._body, _Counted) and self._body.until_close and error is None:
            self._finish(time.perf_counter())
        elif self._head or self._body is not None:
            self._done.set_exception(HttpError(f"the connection broke off: {error or 'closed'}"))
        else:
            self._done.set_exception(_Unused("the server closed the connection without an answer"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _finish(self, at: float) -> None:
        assert self._answer is not None
        assert self._done is not None
        answer, self._answer = self._answer, None
        answer.ended = at
        kept = answer.headers.get("connection", "").lower() != "close"
        self.reusable = kept and not getattr(self._body, "until_close", False)
        self._done.set_result(answer)

    def _read_head(self, data: bytes) -> bytes:
        """Take status and headers off the front; returns what is left of the data."""
        assert self._answer is not None
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD:
                raise ValueError(f"headers longer than {MAX_HEAD} bytes")
            return b""
        status, *lines = self._head[:end].decode("latin-1").split("\r\n")
        rest = self._head[end + 4 :]
        version, code, *_ = (*status.split(" ", 2), "", "")
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise ValueError(f"status line {status!r}")
        if code.startswith("1"):  # 100 Continue and its like come before the answer
            self._head = b""
            return self._read_head(rest)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._answer.status, self._answer.headers = int(code), headers
        self._body = _body_of(headers, int(code))
        return rest


class _Counted:
    """A body of a known length, or one that ends with the connection (``None``)."""

    def __init__(self, length: int | None) -> None:
        self.until_close = length is None
        self._left = length or 0

    @property
    def complete(self) -> bool:
        return not self.until_close and self._left == 0

    def feed(self, data: bytes) -> bytes:
        if not self.until_close:
            data = data[: self._left]
            self._left -= len(data)
        return data


class _Chunked:
    """Transfer coding ``chunked`` (RFC 9112, section 7.1). Trailers are dropped."""

    def __init__(self) -> None:
        self.complete = False
        self._rest = b""
        self._left = 0
        """Bytes still to come of the chunk at hand, its closing line break included."""
        self._ending = False

    def feed(self, data: bytes) -> bytes:
        out = []
        data = self._rest + data if self._rest else data
        at = 0
        while not self.complete and at < len(data):
            if self._left:
                taken = min(self._left, len(data) - at)
                content = min(taken, max(0, self._left - 2))
                out.append(data[at : at + content])
                self._left -= taken
                at += taken
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._line(data[at:end])
            at = end + 2
        self._rest = data[at:]
        return out[0] if len(out) == 1 else b"".join(out)

    def _line(self, line: bytes) -> None:
        if self._ending:  # trailers, then an empty line
            self.complete = not line
            return
        size = int(line.split(b";")[0], 16)
        self._ending = size == 0
        self._left = size + 2 if size else 0


def _body_of(headers: Mapping[str, str], status: int) -> _Chunked | _Counted:
    if status in (204, 304):
        return _Counted(0)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _Chunked()
    length = headers.get("content-length")
    return _Counted(None if length is None else int(length))


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
