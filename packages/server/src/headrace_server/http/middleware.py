"""Middleware that every HTTP request passes, as pure ASGI so that streams are not touched."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_server.errors.mapping import ErrorAnswer, ShuttingDown, answer, log_refused
from headrace_server.http.h11_protocol import direct_write, replace_direct_write
from headrace_server.http.paths import OPEN_PATHS, route_path
from headrace_server.observability.metrics import HttpTraffic
from headrace_server.state import Lifecycle, Serving

_UNCOUNTED = frozenset(
    {"/metrics", "/health", "/livez", "/readyz", "/load", "/ping", "/version", "/server_info"}
)
_SERVED_WHILE_DRAINING = OPEN_PATHS | {"/metrics", "/load"}
_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")
MAX_ID_LENGTH = 128


def is_request_id(text: str) -> bool:
    """True if a client's id may be part of ours, of a header and of a log line."""
    return 0 < len(text) <= MAX_ID_LENGTH and _ID_CHARACTERS.issuperset(text)


class RootPath:
    """Say under which prefix a proxy publishes this server; paths come with it or without."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "root_path": self._root_path}
        if (
            scope["type"] == "http" and scope["path"] == self._root_path
        ):  # the first page, as people type it
            scope["path"] += "/"
            scope["raw_path"] = scope.get("raw_path", b"") + b"/"
        await self._app(scope, receive, send)


class RequestIds:
    """Give each request an id, its own ``X-Request-Id`` or a random one."""

    def __init__(self, app: ASGIApp, in_response: bool) -> None:
        self._app = app
        self._in_response = in_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        text = given.decode("latin-1")
        request_id = text if is_request_id(text) else uuid.uuid4().hex
        scope["headrace_request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", request_id.encode())],
                }
            await send(message)

        await self._app(scope, receive, send_with_id if self._in_response else send)


class Limits:
    """Refuse heads with too many lines (431), and bodies that are compressed (415), have too many
    bytes (413) or come too slowly (408).

    Args:
        max_headers: lines.
        max_body: bytes.
        body_timeout: seconds for a whole body.
        min_rate: bytes a second, after a second's grace; 0: none.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_headers: int,
        max_body: int,
        body_timeout: float = 60.0,
        min_rate: int = 0,
    ) -> None:
        self._app = app
        self._max_headers = max_headers
        self._max_body = max_body
        self._body_timeout = body_timeout
        self._min_rate = min_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if len(scope["headers"]) > self._max_headers:
            reply = ErrorAnswer(431, f"more than {self._max_headers} header lines")
            await _refuse(reply, scope, receive, send)
            return
        coding = next((v for k, v in scope["headers"] if k == b"content-encoding"), b"")
        if coding.strip().lower() not in (b"", b"identity"):
            reply = ErrorAnswer(
                415, "compressed bodies are not read; send it without Content-Encoding"
            )
            await _refuse(reply, scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        too_large = ErrorAnswer(413, f"the body is larger than {self._max_body} bytes")
        if declared.isdigit() and int(declared) > self._max_body:
            await _refuse(too_large, scope, receive, send)
            return
        await self._limited(scope, receive, send, too_large)

    async def _limited(
        self, scope: Scope, receive: Receive, send: Send, too_large: ErrorAnswer
    ) -> None:
        seen = 0
        started = whole = False
        begin = time.monotonic()

        async def count(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        async def take() -> Message:
            nonlocal seen, whole
            if whole:  # what comes now is the end of the connection, whenever that is
                return await receive()
            message = await self._in_time(receive, seen, begin)
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > self._max_body:
                raise _Refused(too_large)
            return message

        try:
            await self._app(scope, take, count)
        except _Refused as refused:
            if not started:
                await _refuse(refused.reply, scope, receive, send)

    async def _in_time(self, receive: Receive, seen: int, begin: float) -> Message:
        """The next piece of a body, of which so many bytes have come."""
        allowed = self._body_timeout
        if self._min_rate:
            allowed = min(allowed, 1.0 + (seen + 1) / self._min_rate)
        left = begin + allowed - time.monotonic()
        try:
            async with asyncio.timeout(max(left, 0.0)):
                return await receive()
        except TimeoutError:
            raise _Refused(ErrorAnswer(408, "the body did not arrive in time")) from None


async def _refuse(reply: ErrorAnswer, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and log why."""
    log_refused(reply, scope.get("headrace_request_id", ""))
    await reply.response()(scope, receive, send)


class _Refused(BaseException):
    """Passes the handlers for ``Exception`` on its way out; never leaves :class:`Limits`."""

    def __init__(self, reply: ErrorAnswer) -> None:
        self.reply = reply


class HeadRequests:
    """Answers HEAD wherever GET is answered: the same status and headers, and no body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
            elif not message.get("more_body"):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        inner = {**scope, "method": "GET"}  # the server's own log says HEAD
        try:
            await self._app(inner, receive, send_head)
        finally:
            scope["route"] = inner.get("route")


class DrainGate:
    """Once draining has begun, new requests other than health checks are a 503."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusing = scope["type"] == "http" and self._lifecycle.draining
        if refusing and route_path(scope) not in _SERVED_WHILE_DRAINING:
            await answer(ShuttingDown()).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class LoadCounter:
    """Count inference requests from their first byte to the last byte of their answer."""

    def __init__(self, app: ASGIApp, state: Serving, paths: Collection[str]) -> None:
        self._app = app
        self._state = state
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        self._state.load += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.load -= 1


class HttpMetrics:
    """Count, duration and sizes of HTTP requests by route; routes that nobody watches left out.

    Args:
        direct: let streams write straight to the socket (:mod:`headrace_server.http.h11_protocol`), counted
            all the same; False where other middleware wants to see every piece.
    """

    def __init__(self, app: ASGIApp, traffic: HttpTraffic, direct: bool = True) -> None:
        self._app = app
        self._traffic = traffic
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status, sent, received = 500, 0, 0

        async def count_in() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def count_out(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        write = direct_write(scope) if self._direct else None

        def count_direct(data: bytes) -> bool:
            nonlocal sent
            assert write is not None
            if not write(data):
                return False
            sent += len(data)
            return True

        replace_direct_write(scope, None if write is None else count_direct)
        try:
            await self._app(scope, count_in, count_out)
        finally:
            handler = getattr(scope.get("route"), "path_format", "none")
            if handler not in _UNCOUNTED:
                self._observe(scope["method"], handler, status, start, received, sent)

    def _observe(
        self, method: str, handler: str, status: int, start: float, received: int, sent: int
    ) -> None:
        method = method if method in _METHODS else "other"
        traffic = self._traffic
        traffic.http_requests.labels(method, handler, str(status)).inc()
        traffic.http_duration.labels(method, handler).observe(time.perf_counter() - start)
        traffic.http_request_size.labels(method, handler).observe(received)
        traffic.http_response_size.labels(method, handler).observe(sent)


_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
