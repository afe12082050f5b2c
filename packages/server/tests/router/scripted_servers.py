"""A router in front of servers that play a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import h11
import uvicorn
from fastapi import FastAPI

from headrace_server.http.h11_protocol import protocol
from headrace_server.router.app import create_router_app
from headrace_server.router.prefixes import SentPrefixes
from headrace_server.router.servers import ServerPool
from headrace_server.router.settings import RouterSettings
from headrace_server.settings import ServerSettings
from headrace_testing.waiting import until

PATIENCE = 20.0
CHAT = "/v1/chat/completions"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Received(NamedTuple):
    """A request, as a server got it."""

    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader


Script = Callable[[Received], Awaitable[None]]


class ScriptedServer:
    """A server that is always well, and otherwise does what its script says."""

    def __init__(self, script: Script, models: str = '{"data": [{"id": "m"}]}') -> None:
        self._script = script
        self._models = models
        self.received: list[Received] = []
        self.url = ""
        self._open: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *reason: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        try:
            while (request := await _read(reader, writer)) is not None:
                if request.target == "/health":
                    writer.write(whole(200, b""))
                elif request.target == "/v1/models":
                    writer.write(whole(200, self._models.encode()))
                else:
                    self.received.append(request)
                    await self._script(request)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        return None  # the other side, or the test, has ended
    headers = {}
    for line in head[1:-2]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(head[0].split()[1], headers, body, writer, reader)


def whole(status: int, body: bytes, *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in lines)
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def routed(
    *servers: ScriptedServer, settings: dict[str, Any] | None = None, **router: Any
) -> AsyncIterator[Router]:
    made = RouterSettings(server=tuple(one.url for one in servers), **router)
    pool, prefilling = (
        ServerPool(made, SentPrefixes(made.prefix_entries), made.key_of_servers({})),
        None,
    )
    if made.prefill:
        prefilling = ServerPool(made, SentPrefixes(made.prefix_entries), prefills=True)
    own = ServerSettings(disable_fastapi_docs=True, **(settings or {}))
    app = create_router_app(pool, own, prefilling)
    config = uvicorn.Config(
        app,
        port=0,
        http=protocol(app.state.headrace.connections),
        log_config=None,
        lifespan="on",
        h11_max_incomplete_event_size=1 << 20,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started or serving.done())
    assert server.started
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Router(port, pool, app)
    finally:
        server.should_exit = server.force_exit = True
        await serving
        pool.close()


class Router:
    def __init__(self, port: int, pool: ServerPool, app: FastAPI) -> None:
        self.port = port
        self.pool = pool
        self.app = app

    async def open(
        self, path: str = CHAT, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = b"" if method == "GET" else json.dumps(body or {"messages": []}).encode()
        lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items())
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{lines}\r\n"
        writer.write(head.encode() + data)
        return reader, writer

    async def ask(self, *args: Any, **how: Any) -> Answer:
        reader, writer = await self.open(*args, **how)
        try:
            async with asyncio.timeout(PATIENCE):
                return await _answer(reader)
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> Answer:
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    http.send(h11.EndOfMessage())
    status, headers, body = 0, {}, b""
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError:
            return Answer(status, headers, body, False)
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {k.decode(): v.decode() for k, v in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            return Answer(status, headers, body, isinstance(event, h11.EndOfMessage))
