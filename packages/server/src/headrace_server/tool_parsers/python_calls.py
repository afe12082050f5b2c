"""Formats that write calls as Python does: ``[add(a=1, b="x"), now()]``.

Keyword arguments with literal values only, and nothing is ever evaluated: the parser finds where
a value ends, :mod:`headrace_server.tool_parsers.python_literals` reads it. A call is one from its first
keyword on (or its closing bracket, if it has none), and its values are given away one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace_server.parsing.text_scanner import ParseError, Steps, TextScanner
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.python_literals import MAX_DEPTH, read_literal
from headrace_server.tool_parsers.schema_values import spell_string
from headrace_server.tool_parsers.streaming_parser import MAX_NAME, StreamingParser
from headrace_server.tool_parsers.value_tags import (
    Parameter,
    listed,
    need_parameters,
    parameters,
    says_nothing,
)

_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonCallsParser(StreamingParser):
    """A list of calls, the first thing in the answer or behind an opening tag."""

    needs_special_tokens = True
    opens = ("<|python_tag|>",)

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        tag, close = cls.opens[0], "".join(cls.closes)
        found = structural_tags.calls([strict_call(*tool) for tool in tools.items()], ", ")
        tagged = structural_tags.tag(f"{tag}[", found, f"]{close}")
        return structural_tags.may_begin(
            structural_tags.tag("[", found, "]"), "[", tag, tagged, ends=False
        )

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        tag, close = cls.opens[0], "".join(cls.closes)
        # Without a closing tag, the opening one may be missing.
        begin = (
            structural_tags.const(tag)
            if close
            else structural_tags.either(structural_tags.const(tag), structural_tags.const(""))
        )
        calls = _forced_list(tools, most)
        return structural_tags.answer(
            begin, structural_tags.SPACE, calls, structural_tags.SPACE, structural_tags.const(close)
        )

    def begin(self) -> Steps[None]:
        yield from self.source.space()
        yield from self.call_list()

    def calls(self, tag: str) -> Steps[None]:
        yield from self.begin()

    def call_list(self) -> Steps[None]:
        """Calls between square brackets."""
        source = self.source
        yield from source.expect("[")
        while True:
            yield from source.space()
            yield from self.python_call()
            yield from source.space()
            if (yield from source.expect(",", "]")) == "]":
                return
            self.next_call()

    def python_call(self) -> Steps[None]:
        """One call."""
        source = self.source
        name = yield from _identifier(source, "._-")
        yield from source.expect("(")
        yield from source.space()
        separator = "{"
        while not (yield from source.accept(")")):
            key = yield from _identifier(source, "_")
            yield from source.space()
            yield from source.expect("=")
            if separator == "{":
                self.open_call(name)
            value = yield from _value(source)
            self.arguments(f"{separator}{spell_string(key)}: {value}")
            separator = ", "
            if (yield from source.accept(",")):
                yield from source.space()
        if separator == "{":
            self.whole_call(name, "{}")
        else:
            self.arguments("}")
            self.close_call()


_ANY_ARGUMENTS = r"""(?:[^'"()]|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")*"""
"""A regex of arguments whatever they are."""


def strict_call(name: str, schema: Mapping[str, Any] | None) -> structural_tags.StructuralTag:
    """A call whose values are written as JSON, which Python's literals include as read here."""
    if schema is not None:
        return _call(name, schema, lambda one: structural_tags.json_schema(one.schema))
    _check_name(name)
    return structural_tags.tag(f"{name}(", structural_tags.regex(_ANY_ARGUMENTS), ")")


def _forced_list(
    tools: Mapping[str, Mapping[str, Any]], most: int
) -> structural_tags.StructuralTag:
    """Calls between square brackets."""
    one = structural_tags.either(*(forced_call(*tool) for tool in tools.items()))
    calls = structural_tags.up_to(one, most, structural_tags.sequence(*structural_tags.loose(", ")))
    return structural_tags.sequence(
        structural_tags.const("["),
        structural_tags.SPACE,
        calls,
        structural_tags.SPACE,
        structural_tags.const("]"),
    )


def forced_call(name: str, schema: Mapping[str, Any]) -> structural_tags.StructuralTag:
    """A call whose values are written as JSON, or in Python's own spelling where that is simple."""
    need_parameters(name, schema)
    return _call(name, schema, _python_value)


_QUOTED = r"'(?:[^'\\\x00-\x1f]|\\[\\'nrt])*'"
"""A regex of a string between single quotes."""


def _python_value(parameter: Parameter) -> structural_tags.StructuralTag:
    json_form, schema = structural_tags.json_schema(parameter.schema), parameter.schema
    if not isinstance(schema, Mapping):
        return json_form
    if says_nothing(schema) and schema.get("type") == "string":
        return structural_tags.either(json_form, structural_tags.regex(_QUOTED))
    if says_nothing(schema) and schema.get("type") == "boolean":
        return structural_tags.either(
            json_form, structural_tags.const("True"), structural_tags.const("False")
        )
    return json_form


def _call(
    name: str,
    schema: Mapping[str, Any],
    write: Callable[[Parameter], structural_tags.StructuralTag],
) -> structural_tags.StructuralTag:
    _check_name(name)
    parts = []
    for one in parameters(name, schema):
        if not _is_identifier(one.name, "_"):
            structural_tags.not_strict(name, one.pointer, "its format cannot write this name")
        parts.append(
            (
                structural_tags.sequence(structural_tags.const(f"{one.name}="), write(one)),
                one.required,
            )
        )
    return structural_tags.tag(f"{name}(", listed(parts, ", ") or structural_tags.const(""), ")")


def _check_name(name: str) -> None:
    if not _is_identifier(name, "._-"):
        structural_tags.not_strict(name, "", "its format cannot write this name")


def _is_identifier(text: str, others: str) -> bool:
    """True if :func:`_identifier` reads all of it."""
    return (
        0 < len(text) <= MAX_NAME
        and not text[0].isdigit()
        and all(character.isalnum() or character in others for character in text)
    )


def _identifier(source: TextScanner, others: str) -> Steps[str]:
    """Letters, digits and some other characters, not beginning with a digit."""
    read: list[str] = []
    while len(read) < MAX_NAME:
        character = yield from source.peek()
        if not character or not (character.isalnum() or character in others):
            break
        read.append(source.take(1))
    if not read or read[0].isdigit():
        raise ParseError
    return "".join(read)


def _value(source: TextScanner) -> Steps[str]:
    """A literal up to the comma or bracket behind it, left unread, as JSON."""
    pieces: list[str] = []
    finder = _EndFinder()
    while not finder.found:
        window = yield from source.window()
        pieces.append(source.take(finder.scan(window)))
        if finder.broken:
            raise ParseError
    value = read_literal("".join(pieces).strip())
    if value is None:
        raise ParseError
    return value


class _EndFinder:
    """Where a literal inside a call's brackets ends."""

    def __init__(self) -> None:
        self.found = False
        self.broken = False
        """The next character closes what was not opened, or nesting is too deep."""
        self._stack: list[str] = []
        """The brackets that are to close what is open."""
        self._quote = ""
        self._escaped = False

    def scan(self, text: str) -> int:
        """Read on; returns the number of characters that belong to the literal."""
        at = 0
        while at < len(text) and not self.found and not self.broken:
            at = self._in_string(text, at) if self._quote else self._outside(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        quote = text.find(self._quote, at)
        end = quote if quote >= 0 else len(text)
        escape = text.find("\\", at, end)
        if escape >= 0:
            self._escaped = True
            return escape + 1
        if quote < 0:
            return end
        self._quote = ""
        return quote + 1

    def _outside(self, text: str, at: int) -> int:
        character = text[at]
        if character in "'\"":
            self._quote = character
        elif character in ",)" and not self._stack:
            self.found = True
            return at
        elif character in _CLOSING and len(self._stack) < MAX_DEPTH:
            self._stack.append(_CLOSING[character])
        elif self._stack and character == self._stack[-1]:
            self._stack.pop()
        elif character in "[({])}":
            self.broken = True
            return at
        return at + 1
