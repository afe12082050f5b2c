"""The model that a request names, read without reading the rest of it.

A JSON body is decoded but for everything else in it. A form is read only until its field ``model``
has come; clients send it before the file. Whatever was read is given to the model's application
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Message, Receive, Scope

from headrace_server.http.json_counts import JsonCounts, exceeds
from headrace_server.http.routing import BOM, MAX_NAMES
from headrace_server.protocols.base import MAX_TOKENS

FIELD = "model"
_MAX_NAME = 1 << 16
"""Bytes of a form's field that can be a name."""


class NamedModel(NamedTuple):
    """The model that a request names."""

    name: Any
    """Text if the client did as it should; None: it names none."""
    receive: Receive
    """Gives the request's body from its beginning."""
    readable: bool = True
    """False: the body is not what it is declared to be, whichever model should take it."""


async def read_name(scope: Scope, receive: Receive) -> NamedModel:
    """The model that a request is for. A name in the body counts before one in the query."""
    kind, options = _content_type(scope)
    messages: list[Message] = []
    readable, name = True, None
    if kind == b"application/json":
        body = await _whole(receive, messages)
        if len(body) <= _SMALL:
            readable, name = _in_json(body)
        else:
            readable, name = await asyncio.to_thread(_in_json, body)
    elif kind == b"multipart/form-data":
        readable, name = await _in_form(receive, options.get(b"boundary", b""), messages)
    if name is None:
        name = _in_query(scope)
    return NamedModel(name, _again(messages, receive), readable)


def _content_type(scope: Scope) -> tuple[bytes, dict[bytes, bytes]]:
    given = next((value for key, value in scope["headers"] if key == b"content-type"), b"")
    kind, options = parse_options_header(given)
    return kind, options


def _in_query(scope: Scope) -> str | None:
    found = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(FIELD)
    return found[0] if found else None


_SMALL = 1 << 18
"""Bytes of a body that are looked through on the event loop."""
_MOST = JsonCounts(MAX_NAMES, MAX_TOKENS)


class _Body(msgspec.Struct):
    model: Any = None


def _in_json(body: bytes) -> tuple[bool, Any]:
    """(whether this is an object that a model could take, its model)."""
    if exceeds(body, _MOST):
        return False, None  # whichever model gets it says what is too much
    try:
        return True, msgspec.json.decode(body.removeprefix(BOM), type=_Body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False, None


async def _whole(receive: Receive, messages: list[Message]) -> bytes:
    return b"".join([part async for part in _parts(receive, messages)])


async def _parts(receive: Receive, messages: list[Message]) -> Any:
    """The body's pieces, as they come; what came stays in ``messages``."""
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _in_form(
    receive: Receive, boundary: bytes, messages: list[Message]
) -> tuple[bool, str | None]:
    """(whether this is a form, its model)."""
    reader = _FieldReader()
    try:
        parser = MultipartParser(boundary, reader.callbacks)
        async for part in _parts(receive, messages):
            parser.write(part)
            if reader.value is not None:
                break
    except FormParserError:
        return False, None
    return True, None if reader.value is None else reader.value.decode("utf-8", "replace")


class _FieldReader:
    """Hears a form and keeps one field."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        """Once its part has ended."""
        self._header = self._header_value = self._text = b""
        self._listening = False
        self.callbacks: Any = {
            "on_part_begin": self._part_begin,
            "on_header_field": self._name_of_header,
            "on_header_value": self._value_of_header,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._part_end,
        }

    def _part_begin(self) -> None:
        self._listening, self._text = False, b""

    def _name_of_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _value_of_header(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            self._listening = options.get(b"name") == FIELD.encode() and b"filename" not in options
        self._header = self._header_value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._listening and len(self._text) <= _MAX_NAME:
            self._text += data[start:end]

    def _part_end(self) -> None:
        if self._listening and self.value is None:
            self.value = self._text


def _again(messages: list[Message], receive: Receive) -> Receive:
    """The messages that were read, then whatever else comes."""
    read: Iterator[Message] = iter(messages)

    async def replay() -> Message:
        message = next(read, None)
        return message if message is not None else await receive()

    return replay
