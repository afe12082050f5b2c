"""JSON in parts that are made as they are asked for, and the answer that sends them so.

An answer of some thousand vectors is a gigabyte. It never exists whole: while one piece waits for the
socket, the next has not been made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_server.streaming.event_stream import wait_disconnect
from headrace_server.streaming.offload import PIECE, OffLoop

_encoder = msgspec.json.Encoder()


class JsonParts:
    """A value that brings its JSON with it.

    Args:
        parts: of the text, in order; read once.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = parts


def json_parts(value: Any) -> Iterator[bytes]:
    """A value as JSON.

    An iterator in it is a list, and a mapping an object; what these hold is encoded likewise. All
    else is one part.
    """
    if isinstance(value, JsonParts):
        yield from value.parts
    elif isinstance(value, Mapping):
        opening = b"{"
        for key, held in value.items():
            yield opening + _encoder.encode(key) + b":"
            yield from json_parts(held)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator):
        opening = b"["
        for held in value:
            yield opening
            yield from json_parts(held)
            opening = b","
        yield b"]" if opening == b"," else b"[]"
    else:
        yield _encoder.encode(value)


def answer_of(
    parts: Iterable[bytes],
    off_loop: OffLoop,
    cost: int,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer with this body: what is small is whole, and says its length.

    Args:
        parts: of the body.
        off_loop: makes them.
        cost: of all of them (:mod:`headrace_server.streaming.offload`).
    """
    if cost <= off_loop.light:
        return Response(b"".join(parts), headers=headers, media_type=media_type)
    return _PartsAnswer(parts, off_loop, cost, media_type, headers)


class _PartsAnswer(Response):
    """An answer whose body is made while it is sent; see :func:`answer_of`."""

    def __init__(
        self,
        parts: Iterable[bytes],
        off_loop: OffLoop,
        cost: int,
        media_type: str,
        headers: Mapping[str, str] | None,
    ) -> None:
        super().__init__(None, headers=headers, media_type=media_type)
        del self.headers["content-length"]  # nobody knows it
        self._parts = iter(parts)
        self._off_loop = off_loop
        self._cost = cost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece = await self._off_loop(self._cost, self._piece)  # what fails here is still an error
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if gone.done():  # what is sent goes nowhere, and nobody would say so
                    return
                piece = await self._off_loop(self._cost, self._piece)
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _piece(self) -> bytes:
        """As many parts as are worth a call; b"": that was all."""
        taken, size = [], 0
        for part in self._parts:
            taken.append(part)
            size += len(part)
            if size >= PIECE:
                break
        return b"".join(taken)
