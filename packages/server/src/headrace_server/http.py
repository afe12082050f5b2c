"""uvicorn's HTTP/1.1 protocol with a short way for the pieces of a streamed answer.

A piece that goes through ASGI passes every middleware and h11's state machine, tens of microseconds
for a few bytes, once per token and client. Neither has anything to say about it: a chunked body's
frame is its length (RFC 9112, section 7.1), and h11 keeps no state between two chunks. So the scope of each
request offers :data:`DIRECT`, a function that writes one chunk to the socket; whatever else
happens (head, end, errors, a client that does not read) goes the usual way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

DIRECT = "headrace.direct_write"
"""Key in the scope's ``extensions``; the value is a :data:`DirectWrite`."""

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


class Protocol(H11Protocol):
    """One connection; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        app: ASGIApp = self.app

        async def offering(scope: Scope, receive: Receive, send: Send) -> None:
            # Only here is the body sure to be chunked: HTTP/1.0 knows no chunks, HEAD no body.
            if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                replace_direct_write(scope, functools.partial(self._write_chunk, self.cycle))
            await app(scope, receive, send)

        self.app = offering

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
