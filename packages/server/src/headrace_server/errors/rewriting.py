"""Error answers in another protocol's form: rewritten on their way out, so that the key gate, the limits
and the drain gate need not know whose client asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Message, Send

_MAX_BODY = 64 * 1024
Rewrite = Callable[[int, Any], dict[str, Any]]
"""Status and decoded body (None: it was not JSON) of an error answer to the body that is sent."""


class ErrorRewriter:
    """A ``send`` that holds an error answer until it is whole, and sends what ``rewrite`` makes of it."""

    def __init__(self, send: Send, rewrite: Rewrite) -> None:
        self._send = send
        self._rewrite = rewrite
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._body = (self._body + message.get("body", b""))[:_MAX_BODY]
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        body = msgspec.json.encode(self._rewrite(start["status"], _decoded(self._body)))
        own = (b"content-length", b"content-type")
        headers = [(k, v) for k, v in start["headers"] if k.lower() not in own]
        headers += [(own[0], str(len(body)).encode()), (own[1], b"application/json")]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def message_of(told: Any) -> str:
    """The sentence in an error body of any of our forms."""
    if isinstance(told, dict):
        told = told.get("error", told.get("detail"))
    if isinstance(told, dict):
        told = told.get("message")
    return told if isinstance(told, str) else "the request failed"


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
