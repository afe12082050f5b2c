"""Passing a request to a server, and its answer back as it comes.

A request is sent to another server as long as nothing of an answer has come: where the connection cannot be
had or breaks before the first byte, and where a server says that it takes no requests now (429, 502, 503,
504). Once the client has a byte, another server would answer something else: the stream ends with an error
that says so.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from headrace_core.errors import EngineDead, entry_of
from headrace_server.errors.mapping import ErrorAnswer, ShuttingDown, answer, log_refused
from headrace_server.http.h11_protocol import direct_write
from headrace_server.http.paths import (
    CONTROL_PATHS,
    MODEL_PATHS,
    ROUTER_PATHS,
    raw_route_path,
    route_path,
)
from headrace_server.protocols.anthropic import errors as anthropic
from headrace_server.router.prefill import Prefill, Transport
from headrace_server.router.requests import ReadRequest, read_request
from headrace_server.router.servers import Server, ServerPool
from headrace_server.router.upstream import ConnectError, UpstreamAnswer, UpstreamError
from headrace_server.state import Lifecycle
from headrace_server.streaming.event_stream import named_event

logger = logging.getLogger(__name__)

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers for one connection only (RFC 9110, section 7.6.1)."""
_OURS_TO_SERVERS = frozenset({b"host", b"content-length", b"expect", b"x-request-id"})
_OURS_TO_CLIENTS = frozenset({b"date", b"server", b"x-request-id"})
_KEYS = frozenset({b"authorization", b"x-api-key"})
TRY_ELSEWHERE = frozenset({429, 502, 503, 504})
"""Statuses of a server that takes nothing now; another may."""
MAX_BROKEN = 2
"""Servers that may break off before one request's answer: a request that ends servers must not end all."""
MAX_REFUSAL = 1 << 20
"""Most bytes of an answer that is kept while others are tried."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
MAX_HELD = 1 << 20
"""Most bytes of an event that is held until its end has come."""
MAX_KEPT_RESPONSES = 10_000
"""Stored responses whose servers are remembered."""
_ENGINE_DEAD = f'"{entry_of(EngineDead("")).code}"'.encode()
_RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[A-Za-z0-9_-]{1,128})"')
_RESPONSES = "/v1/responses"
_LAST_EVENTS = frozenset({
    (b"data", b"[DONE]"), (b"event", b"message_stop"), (b"event", b"response.completed"),
    (b"event", b"response.incomplete"), (b"event", b"response.failed"),
})  # fmt: skip
"""Fields of the event that ends a stream, in each protocol."""
_NOT_PASSED_ON = CONTROL_PATHS | MODEL_PATHS | ROUTER_PATHS
KNOWN_PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", _RESPONSES, "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/rerank", "/rerank",
    "/v2/rerank", "/v2/embed", "/score", "/v1/score", "/classify", "/pooling", "/tokenize", "/detokenize",
    "/invocations", "/inference/v1/generate",
})  # fmt: skip
"""Paths that metrics know by name."""


class _Refusal(NamedTuple):
    """An answer of a server that takes nothing now."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class _ClientGone(Exception):
    """The client closed the connection."""


class Proxy:
    """ASGI application: passes requests on to servers.

    Args:
        pool: the servers.
        lifecycle: counts what is in flight, and ends it when the router stops.
        prefill: has prompts computed before; None: servers do it themselves.
    """

    def __init__(
        self, pool: ServerPool, lifecycle: Lifecycle, prefill: Prefill | None = None
    ) -> None:
        self._pool = pool
        self._prefill = prefill
        self._lifecycle = lifecycle
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Stored response -> URL of the server that stores it."""
        self.num_retries = self.num_broken = self.num_refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        scope["route"] = SimpleNamespace(path_format=path if path in KNOWN_PATHS else "none")
        reply = _Reply(scope, receive, send)
        if path in _NOT_PASSED_ON or raw_route_path(scope) in _NOT_PASSED_ON:
            why = f"{path}: the router passes no control routes on; ask the server itself"
            await reply.refuse(ErrorAnswer(404, why))
            return
        try:
            body = await _body(receive)
        except _ClientGone:
            return
        request = read_request(path, body)
        request.prompt.authorization = next(
            (v for k, v in scope["headers"] if k == b"authorization"), b""
        )
        work = asyncio.create_task(self._answer(scope, request, reply))
        gone = asyncio.create_task(_until_gone(receive))
        stopped = asyncio.Event()

        def stop() -> None:
            stopped.set()
            work.cancel()

        with self._lifecycle.track(reply.request_id, stop):
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not work.done():
                    work.cancel()
            await asyncio.wait({work})
            if stopped.is_set():
                await reply.fail(answer(ShuttingDown()))
            elif not work.cancelled():
                work.result()

    async def _answer(self, scope: Scope, request: ReadRequest, reply: _Reply) -> None:
        """Have one server after the other try, until one has begun to answer."""
        tried: list[Server] = []
        broken: list[str] = []
        refusal: _Refusal | None = None
        home = self._home(request)
        if self._prefill is not None and home is None and scope["method"] == "POST":
            how = Transport(_target(scope), self._headers(scope, reply))
            request.prompt.body = await self._prefill.prepared(request, how)
        while len(broken) < MAX_BROKEN:
            server = await self._choose(request, home, tried)
            if server is None:
                break
            if tried:
                self.num_retries += 1
            tried.append(server)
            try:
                refusal = await self._attempt(server, scope, request, reply) or None
            except UpstreamError as error:
                logger.warning("request %s: %s: %s", reply.request_id, server.url, error)
                server.failed(str(error), is_down=isinstance(error, ConnectError))
                if reply.started:
                    self.num_broken += 1
                    await reply.fail(ErrorAnswer(
                        502, f"{server.name} broke off in the middle of its answer: {error}"
                    ))  # fmt: skip
                    return
                if not isinstance(error, ConnectError):
                    broken.append(f"{server.name}: {error}")
                continue
            if refusal is None:
                return
        self.num_refused += 1
        if refusal is not None:
            await reply.pass_on(refusal)
        elif broken:
            await reply.fail(ErrorAnswer(502, f"no server answered: {'; '.join(broken)}"))
        else:
            await reply.fail(self._nobody(home))

    async def _choose(
        self, request: ReadRequest, home: Server | None, tried: list[Server]
    ) -> Server | None:
        if home is not None:  # no other has what is asked for
            return home if home.is_well and home not in tried else None
        return await self._pool.choose(request.prompt, request.model, tried)

    async def _attempt(
        self, server: Server, scope: Scope, request: ReadRequest, reply: _Reply
    ) -> _Refusal | None:
        """Ask one server, and pass its answer on; its refusal, if it takes nothing now.

        Raises:
            UpstreamError: it broke off, or was not to be reached.
        """
        server.in_flight += 1
        server.num_requests += 1
        try:
            came = await server.upstream.request(
                scope["method"], _target(scope), self._headers(scope, reply), request.prompt.body
            )
            try:
                if _is_refusal(came):
                    body = await came.read(MAX_REFUSAL)
                    if came.status != 500 or _ENGINE_DEAD in body:
                        return _Refusal(came.status, came.headers, body)
                    await reply.pass_on(_Refusal(came.status, came.headers, body))
                    return None
                await self._pass_on(server, came, request, reply)
            finally:
                came.close()
        finally:
            server.in_flight -= 1
        return None

    async def _pass_on(
        self, server: Server, came: UpstreamAnswer, request: ReadRequest, reply: _Reply
    ) -> None:
        pieces = came.pieces()
        first = await anext(pieces, b"")  # until it is there, another server may answer
        server.succeeded()
        if request.prompt.path == _RESPONSES and (found := _RESPONSE_ID.search(first)):
            self._homes[found.group(1).decode()] = server.url
            if len(self._homes) > MAX_KEPT_RESPONSES:
                self._homes.popitem(last=False)
        await reply.begin(came.status, came.headers)
        await reply.write(first)
        async for piece in pieces:
            await reply.write(piece)
        await reply.end()

    def _home(self, request: ReadRequest) -> Server | None:
        """The server that stores the response which a request names."""
        path = request.prompt.path
        named = request.previous_response_id
        if path.startswith(_RESPONSES + "/"):
            named = path.removeprefix(_RESPONSES + "/").partition("/")[0]
        url = self._homes.get(named or "")
        return None if url is None else self._pool.find(url)

    def _headers(self, scope: Scope, reply: _Reply) -> list[tuple[bytes, bytes]]:
        own = self._pool.key_headers
        dropped = _OURS_TO_SERVERS | (_KEYS if own else frozenset())
        headers = [(k, v) for k, v in _end_to_end(scope["headers"]) if k not in dropped]
        return [*headers, *own, (b"x-request-id", reply.request_id.encode())]

    def _nobody(self, home: Server | None) -> ErrorAnswer:
        """Why there is no server for a request."""
        if home is not None:
            return ErrorAnswer(503, f"{home.name}, which stores this response, cannot be reached",
                               headers={"Retry-After": "1"})  # fmt: skip
        servers = self._pool.servers
        draining = sum(server.is_draining for server in servers)
        ill = sum(not server.is_well and not server.is_draining for server in servers)
        return ErrorAnswer(
            503,
            f"no server can take this request: of {len(servers)}, {ill} cannot be reached or are not "
            f"well, {draining} are drained",
            headers={"Retry-After": "1"},
        )


class _Reply:
    """The answer to a client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id: str = scope.get("headrace_request_id", "")
        self.started = False
        """The client has the head."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._direct: Callable[[bytes], bool] | None = None
        self._is_events = False
        self._is_over = False
        """The client has a last event: another end would be a second one."""
        self._has_ended = False
        """The body has been closed."""
        self._held = b""
        """Beginning of an event whose end has not come: the client could do nothing with it."""

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head."""
        kept = [(k, v) for k, v in _end_to_end(headers) if k not in _OURS_TO_CLIENTS]
        kind = next((v for k, v in kept if k == b"content-type"), b"")
        self._is_events = kind.startswith(b"text/event-stream")
        if status < 400 and not any(k == b"content-length" for k, _ in kept):
            self._direct = direct_write(self._scope)
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if self._is_events:
            piece, self._held = _whole_events(self._held + piece)
            self._is_over = self._is_over or _ends_stream(piece)
        await self._put(piece)

    async def _put(self, piece: bytes) -> None:
        if not piece:
            return
        if self._direct is None or not self._direct(piece):
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """The body is whole."""
        if self._has_ended:
            return
        self._has_ended = True
        await self._put(self._held)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def pass_on(self, refusal: _Refusal) -> None:
        """Send a whole answer."""
        await self.begin(refusal.status, refusal.headers)
        await self.write(refusal.body)
        await self.end()

    async def refuse(self, error: ErrorAnswer) -> None:
        """Answer with an error."""
        log_refused(error, self.request_id)
        self.started = True
        await error.response()(self._scope, self._receive, self._send)

    async def fail(self, error: ErrorAnswer) -> None:
        """An error, as an answer or as the last event of a stream.

        An answer that is no stream of events is left as it is: the connection ends, which tells the client
        that it is not whole. A stream whose last event has come is whole, whatever broke off behind it.
        """
        if self._has_ended:
            return
        if not self.started:
            await self.refuse(error)
            return
        if not self._is_events:
            logger.warning("request %s: cut off: %s", self.request_id, error.message)
            return
        self._held = b""
        if not self._is_over:
            await self.write(self._error_events(error))
        await self.end()

    def _error_events(self, error: ErrorAnswer) -> bytes:
        path = route_path(self._scope)
        if anthropic.is_ours(path):
            body: Any = anthropic.error_body(error.status, error.message)
            return named_event("error", body)
        if path == _RESPONSES:
            return named_event("error", {
                "type": "error", "code": "server_error", "message": error.message, "param": None,
            })  # fmt: skip
        return b"data: " + error.encoded() + b"\n\ndata: [DONE]\n\n"


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Events that are whole, and the beginning of one that is not."""
    ends = [data.rfind(mark) + len(mark) for mark in _EVENT_ENDS if mark in data]
    if not ends:
        return (b"", data) if len(data) <= MAX_HELD else (data, b"")
    return data[: max(ends)], data[max(ends) :]


def _ends_stream(events: bytes) -> bool:
    """True if the last of some whole events says that it is its stream's last."""
    text = events.rstrip(b"\r\n")
    last = text[max(text.rfind(mark) for mark in _EVENT_ENDS) + 1 :]
    fields = (line.partition(b":") for line in last.splitlines())
    return any((name, value.strip()) in _LAST_EVENTS for name, _, value in fields)


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers without those that are for one connection only, named by ``Connection`` or by the RFC."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key == b"connection"
        for name in value.split(b",")
    }
    return [(k, v) for k, v in headers if k not in HOP_BY_HOP and k not in named]


def _is_refusal(came: UpstreamAnswer) -> bool:
    """True if a server may take nothing now; a 500 is looked at more closely."""
    return came.status in TRY_ELSEWHERE or came.status == 500


def _target(scope: Scope) -> bytes:
    path: bytes = raw_route_path(scope).encode("latin-1")
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


async def _body(receive: Receive) -> bytes:
    """The request's whole body, which the middleware has bounded.

    Raises:
        _ClientGone: the client left before its end.
    """
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
