"""Calls whose form a constraint on decoding has already forced.

These are no plug-ins: the server uses them for ``tool_choice`` "required" and for a named
function, whatever the model's own format is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.text import ParsedDelta, ToolCallDelta, ToolCallParser
from headrace_server.parsing.text_scanner import JSON_SPACE, Steps
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class ForcedToolCallParser(ObjectsParser):
    """``[{"name": ..., "parameters": {...}}, ...]``, the whole text, possibly cut short."""

    format = ObjectFormat(array=True)

    def allows(self, name: str) -> bool:
        """Any text: the constraint wrote the name of a tool."""
        return bool(name) and not any("\ud800" <= character <= "\udfff" for character in name)

    def begin(self) -> Steps[None]:
        yield from self.objects()

    def calls(self, tag: str) -> Steps[None]:
        raise AssertionError("there is no opening tag")


class NamedToolCallParser(ToolCallParser):
    """The whole text is the arguments of one function.

    Args:
        name: the function.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, name: str) -> None:
        super().__init__(tools)
        self._name: str | None = name
        """Until it was given away."""
        self._begun = False
        self._space = ""
        """White space that may be the text's end."""

    def feed(self, text: str) -> ParsedDelta:
        if not self._begun:
            text = text.lstrip(JSON_SPACE)
        if not text:
            return ParsedDelta()
        self._begun = True
        said = text.rstrip(JSON_SPACE)
        if not said:
            self._space += text
            return ParsedDelta()
        text, self._space = self._space + said, text[len(said) :]
        return self._give(text)

    def finish(self) -> ParsedDelta:
        return ParsedDelta() if self._name is None else self._give("")

    def _give(self, arguments: str) -> ParsedDelta:
        name, self._name = self._name, None
        return ParsedDelta(tool_calls=[ToolCallDelta(0, name, arguments)])
