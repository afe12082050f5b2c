"""Calls that a constraint forced: JSON, with nothing around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace_core.text import ParsedDelta, ToolCallDelta, ToolCallParser


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


class ForcedToolCallParser(ToolCallParser):
    """``[{"name": ..., "parameters": {...}}, ...]``; given out when whole."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._pieces: list[str] = []

    def feed(self, text: str) -> ParsedDelta:
        self._pieces.append(text)
        return ParsedDelta()

    def finish(self) -> ParsedDelta:
        text = "".join(self._pieces)
        try:
            calls = msgspec.json.decode(text, type=list[_Call])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return ParsedDelta(content=text)
        return ParsedDelta(
            tool_calls=[
                ToolCallDelta(index, call.name, bytes(call.parameters).decode())
                for index, call in enumerate(calls)
            ]
        )


class NamedToolCallParser(ToolCallParser):
    """The arguments of one call."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, name: str) -> None:
        super().__init__(tools)
        self._name = name
        self._begun = False

    def feed(self, text: str) -> ParsedDelta:
        if not text:
            return ParsedDelta()
        name = None if self._begun else self._name
        self._begun = True
        return ParsedDelta(tool_calls=[ToolCallDelta(0, name, text)])

    def finish(self) -> ParsedDelta:
        return ParsedDelta()
