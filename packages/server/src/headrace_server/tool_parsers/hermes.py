"""Hermes and Qwen format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A machine with five states reads characters once, so time is linear whatever the model writes. A
call is reported when its closing tag has come and its JSON is right; until then it is held back,
because what turns out to be no call must come out as content, in the same way however the text was
cut. White space next to a call belongs to the format and is dropped; all other text is kept.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace_core.text import ParsedDelta, ToolCallDelta, ToolCallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON_SPACE = " \t\r\n"


class _Call(msgspec.Struct):
    """A call as the model writes it; arguments keep their spelling."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _State(enum.Enum):
    TEXT = enum.auto()
    """Outside; white space and a beginning of the opening tag are held."""
    BEFORE = enum.auto()
    """After the opening tag: white space, then ``{``."""
    OBJECT = enum.auto()
    """Inside the object, outside strings."""
    STRING = enum.auto()
    """Inside a JSON string."""
    AFTER = enum.auto()
    """After the object: white space, then the closing tag."""


class HermesToolParser(ToolCallParser):
    """See the module."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._state = _State.TEXT
        self._space: list[str] = []
        """White space at the end of the text so far, outside calls."""
        self._tag = ""
        """Beginning of a tag."""
        self._held: list[str] = []
        """A possible call from its opening tag on."""
        self._body: list[str] = []
        """Its JSON."""
        self._depth = 0
        self._escaped = False
        self._num_calls = 0
        self._after_call = False

    def feed(self, text: str) -> ParsedDelta:
        delta = ParsedDelta()
        content: list[str] = []
        for character in text:
            self._take(character, content, delta)
        delta.content = "".join(content)
        return delta

    def finish(self) -> ParsedDelta:
        content: list[str] = []
        if self._state is not _State.TEXT:
            self._give_up(content)
        if self._tag:
            self._flush(content)
        elif not self._after_call:
            content += self._space
        self._space = []
        return ParsedDelta("".join(content))

    def _take(self, character: str, content: list[str], delta: ParsedDelta) -> None:
        match self._state:
            case _State.TEXT:
                self._text(character, content)
            case _State.BEFORE:
                self._before(character, content)
            case _State.OBJECT:
                self._object(character, content)
            case _State.STRING:
                self._string(character)
            case _State.AFTER:
                self._after(character, content, delta)

    def _text(self, character: str, content: list[str]) -> None:
        if self._tag and not OPEN.startswith(self._tag + character):
            self._flush(content)
        if OPEN.startswith(self._tag + character):
            self._tag += character
            if self._tag == OPEN:
                self._held, self._body, self._tag = [OPEN], [], ""
                self._state = _State.BEFORE
        elif character.isspace():
            self._space.append(character)
        else:
            content += [*self._space, character]
            self._space = []
            self._after_call = False

    def _flush(self, content: list[str]) -> None:
        """What looked like an opening tag is text."""
        content += [*self._space, self._tag]
        self._space, self._tag = [], ""
        self._after_call = False

    def _before(self, character: str, content: list[str]) -> None:
        if character == "{":
            self._state, self._depth = _State.OBJECT, 1
            self._keep(character)
        elif character in _JSON_SPACE:
            self._held.append(character)
        else:
            self._give_up(content, character)

    def _object(self, character: str, content: list[str]) -> None:
        if character == "<":
            self._give_up(content, character)
            return
        self._keep(character)
        if character == '"':
            self._state, self._escaped = _State.STRING, False
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._state = _State.AFTER

    def _string(self, character: str) -> None:
        self._keep(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._state = _State.OBJECT

    def _after(self, character: str, content: list[str], delta: ParsedDelta) -> None:
        if not self._tag and character in _JSON_SPACE:
            self._held.append(character)
        elif CLOSE.startswith(self._tag + character):
            self._tag += character
            self._held.append(character)
            if self._tag == CLOSE:
                self._close(content, delta)
        else:
            self._give_up(content, character)

    def _keep(self, character: str) -> None:
        self._held.append(character)
        self._body.append(character)

    def _close(self, content: list[str], delta: ParsedDelta) -> None:
        call = _decode("".join(self._body))
        if call is None:
            self._give_up(content)
            return
        delta.tool_calls.append(ToolCallDelta(self._num_calls, *call))
        self._num_calls += 1
        self._state, self._tag, self._space = _State.TEXT, "", []
        self._held, self._body = [], []
        self._after_call = True

    def _give_up(self, content: list[str], character: str = "") -> None:
        """What is held is no call: it is text, and ``character`` is read again as text."""
        content += [*self._space, *self._held]
        self._state, self._tag, self._space = _State.TEXT, "", []
        self._held, self._body = [], []
        self._after_call = False
        if character:
            self._text(character, content)


def _decode(text: str) -> tuple[str, str] | None:
    """Name and arguments, or None if the object is no call."""
    try:
        call = msgspec.json.decode(text, type=_Call)
        arguments = bytes(call.arguments)
        if not call.name or not isinstance(msgspec.json.decode(arguments), dict):
            return None
        return call.name, arguments.decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
