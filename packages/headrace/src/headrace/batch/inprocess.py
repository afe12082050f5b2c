"""Requests to the server's application in this process, without a socket.

A batch's requests pass the same routes, checks and error bodies as those of an HTTP client, because
they are the same code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_server.security.auth import KEY_IN_SCOPE
from headrace_server.security.keys import Key

logger = logging.getLogger(__name__)


class InProcessResponse(NamedTuple):
    """Response of a route."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class InProcess:
    """A client of the server's application, which it takes for the operator: it needs no key."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def post(self, path: str, body: bytes) -> InProcessResponse:
        """POST a JSON body and wait for the whole answer. Cancelling ends the request."""
        exchange = _Exchange(body)
        try:
            await self._app(self._scope(path, body), exchange.receive, exchange.send)
        except Exception:
            # The application has answered with a 500 and logged it; servers see the error again.
            if not exchange.status:
                raise
        return InProcessResponse(exchange.status, exchange.headers, b"".join(exchange.body))

    def _scope(self, path: str, body: bytes) -> dict[str, Any]:
        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": b"", "headers": headers, "client": None, "server": ("batch", 0),
            "extensions": {}, KEY_IN_SCOPE: Key("batch", b""),
        }  # fmt: skip


class _Exchange:
    """One request and its answer."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        # The client stays until it has the answer; then this is cancelled.
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            self.body.append(message.get("body", b""))
