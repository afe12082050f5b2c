"""``/metrics`` and health routes of an application on a port, while a batch runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

PATHS = frozenset({"/metrics", "/health", "/livez", "/readyz", "/ping", "/version"})


class _Server(uvicorn.Server):
    """Leaves signals to the batch."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def only_metrics(app: Any) -> Any:
    """An ASGI application that has of ``app`` nothing but :data:`PATHS`."""

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in PATHS:
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 404, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return limited


@contextlib.asynccontextmanager
async def serving_metrics(app: Any, listening: socket.socket | None) -> AsyncIterator[None]:
    """Serve while the block runs; None: do not."""
    if listening is None:
        yield
        return
    config = uvicorn.Config(
        only_metrics(app), ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
