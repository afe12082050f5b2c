"""Kimi K2: ``functions.NAME:IDX`` is a call's id and says its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.text import CallDelimiters
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.delimiters import Delimiters, DelimitersParser


class KimiK2ToolParser(DelimitersParser):
    """Kimi K2: ``functions.NAME:IDX`` is a call's id and says its name."""

    opens = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closes = ("<|tool_calls_section_end|>", "<|tool_call_end|>")
    format = Delimiters(
        section="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        section_end="<|tool_calls_section_end|>",
    )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._ids: list[str] = []
        self._written = ""
        """The id that the current call has between its tags; "" if none."""

    @classmethod
    def call_delimiters(cls, name: str) -> CallDelimiters | None:
        return None  # The format counts the calls.

    @classmethod
    def strict_name(cls, name: str) -> Sequence[structural_tags.StructuralTag]:
        return [structural_tags.const(f"functions.{name}:"), structural_tags.regex("[0-9]{1,3}")]

    def open_call(self, name: str) -> None:
        super().open_call(name)
        self._ids.append("" if self._written in self._ids else self._written)

    def name_of(self, text: str) -> str:
        self._written = text
        name, colon, index = text.rpartition(":")
        if not colon or not (index.isascii() and index.isdigit()):
            name, self._written = text, ""
        return name.removeprefix("functions.")

    def call_id(self, index: int, name: str) -> str | None:
        """``functions.NAME:IDX``, as the model wrote it."""
        written = self._ids[index] if index < len(self._ids) else ""
        return written or f"functions.{name}:{index}"
