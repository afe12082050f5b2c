"""FunctionGemma: ``<start_function_call>call:NAME{K:<escape>V<escape>,N:1}<end_function_call>``.

Strings stand between escape tags; numbers, true, false, null, lists and objects are bare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_server.parsing.text_scanner import ParseError, Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.schema_values import ANY, SchemaValues, spell, spell_string
from headrace_server.tool_parsers.streaming_parser import MAX_NAME, StreamingParser
from headrace_server.tool_parsers.value_tags import (
    BareText,
    Parameter,
    listed,
    need_parameters,
    parameters,
    value_types,
)

MAX_DEPTH = 32
"""Deeper nesting is no call."""
MAX_BARE = 512
"""Characters of a value that is no string."""

_ESCAPE = "<escape>"
_END = "<end_function_call>"


class FunctionGemmaToolParser(StreamingParser):
    """FunctionGemma: ``call:F{key:value}`` between tags; strings between ``<escape>``."""

    needs_special_tokens = True
    opens = ("<start_function_call>",)
    closes = (_END,)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._values = SchemaValues(tools)

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        return structural_tags.free_text(cls.opens, [_strict_call(*tool) for tool in tools.items()])

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        for tool in tools.items():
            need_parameters(*tool)
        one = structural_tags.either(*(_strict_call(*tool) for tool in tools.items()))
        return structural_tags.answer(structural_tags.up_to(one, most))

    def calls(self, tag: str) -> Steps[None]:
        source = self.source
        yield from source.space()
        yield from source.expect("call:")
        name = yield from self.name()
        yield from source.expect("{")
        self.open_call(name)
        separator = "{"
        yield from source.space()
        while not (yield from source.accept("}")):
            if separator == ", ":
                yield from source.expect(",")
            key, value = yield from self._entry(0, name)
            self.arguments(f"{separator}{spell_string(key)}: {value}")
            separator = ", "
            yield from source.space()
        self.arguments("{}" if separator == "{" else "}")
        self.close_call()
        yield from source.space()
        yield from source.expect(_END)

    def _entry(self, depth: int, function: str = "") -> Steps[tuple[str, str]]:
        """A key and its value as JSON; ``function`` if it is a parameter's."""
        yield from self.source.space()
        if (yield from self.source.accept(_ESCAPE)):
            key, _ = yield from self.source.before((_ESCAPE,), limit=MAX_NAME)
            yield from self.source.expect(":")
        else:
            key, _ = yield from self.source.before((":",), limit=MAX_NAME)
        key = key.strip()
        types = self._values.types(function, key) if function else frozenset({"string"})
        value = yield from self._value(depth, types)
        return key, value

    def _value(self, depth: int, types: frozenset[str]) -> Steps[str]:
        """A value as JSON. ``types`` are those of a string's text."""
        source = self.source
        if depth > MAX_DEPTH:
            raise ParseError
        yield from source.space()
        if (yield from source.accept(_ESCAPE)):
            pieces: list[str] = []
            if not (yield from source.until((_ESCAPE,), pieces.append)):
                raise ParseError
            return spell("".join(pieces), frozenset({"string"}) if types == ANY else types)
        if (yield from source.accept("{")):
            return (yield from self._items("}", depth))
        if (yield from source.accept("[")):
            return (yield from self._items("]", depth))
        return (yield from self._bare(types))

    def _items(self, close: str, depth: int) -> Steps[str]:
        """The rest of an object or a list, behind its opening bracket."""
        items: list[str] = []
        yield from self.source.space()
        while not (yield from self.source.accept(close)):
            if items:
                yield from self.source.expect(",")
            if close == "}":
                key, value = yield from self._entry(depth + 1)
                items.append(f"{spell_string(key)}: {value}")
            else:
                items.append((yield from self._value(depth + 1, frozenset({"string"}))))
            yield from self.source.space()
        return ("{" if close == "}" else "[") + ", ".join(items) + close

    def _bare(self, types: frozenset[str]) -> Steps[str]:
        """A number, true, false or null; anything else is a string."""
        read: list[str] = []
        while (character := (yield from self.source.peek())) and character not in ",}]":
            if len(read) == MAX_BARE or character in "{[<":
                raise ParseError
            read.append(self.source.take(1))
        text = "".join(read).strip()
        if not text:
            raise ParseError
        return spell(text, types if types != {"string"} else ANY)


def _strict_call(name: str, schema: Mapping[str, Any] | None) -> structural_tags.StructuralTag:
    begin, end = f"<start_function_call>call:{name}{{", "}" + _END
    if schema is None:
        return structural_tags.tag(begin, structural_tags.FREE, end)
    parts = []
    for one in parameters(name, schema):
        key = one.name
        if key != key.strip() or len(key) > MAX_NAME or ":" in key or _ESCAPE in key or not key:
            structural_tags.not_strict(name, one.pointer, "its format cannot write this name")
        value = _strict_value(name, one)
        parts.append(
            (structural_tags.sequence(structural_tags.const(f"{key}:"), value), one.required)
        )
    return structural_tags.tag(begin, listed(parts, ",") or structural_tags.const(""), end)


def _strict_value(tool: str, parameter: Parameter) -> structural_tags.StructuralTag:
    """Text between tags, or a bare number or word; of lists and objects nothing is held."""
    types = value_types(tool, parameter)
    if types <= {"integer", "number", "boolean", "null"}:
        return structural_tags.json_schema(parameter.schema)
    if not types <= {"string"}:
        structural_tags.not_strict(
            tool, parameter.pointer, "only strings, numbers, booleans and null are held to a schema"
        )
    text = BareText(_ESCAPE, newlines=False).tag(tool, parameter)
    return structural_tags.tag(_ESCAPE, structural_tags.FREE if text is None else text, _ESCAPE)
