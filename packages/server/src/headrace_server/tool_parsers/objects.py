"""Formats that write a call as one JSON object: ``{"name": ..., "arguments": {...}}``.

One object or several, bare or in a list, between tags or without any: :class:`ObjectFormat` says
which. Name and arguments may come in either order; arguments are given away as they come once the
name is known. Other members of the object are read and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_core.text import CallDelimiters
from headrace_server.parsing.text_scanner import ParseError, Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.json_values import json_object, json_string, json_value
from headrace_server.tool_parsers.schema_values import spell_string
from headrace_server.tool_parsers.streaming_parser import StreamingParser, drop


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """Layout of JSON objects in a section of calls."""

    array: bool = False
    """A JSON list of objects."""
    separator: str | None = None
    """Text between several objects outside of a list; "" for white space only; None: a
    section has one object."""
    close: tuple[str, ...] = ()
    """Marks that end a section."""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Members that hold the arguments."""
    arguments_optional: bool = False
    """An object without them is a call without arguments."""
    others: tuple[str, ...] | None = None
    """Other members that an object may have; None: any. Where no tag says that calls follow, this
    keeps JSON that is an answer from being held until its end."""


class ObjectsParser(StreamingParser):
    """A format given by an :class:`ObjectFormat`."""

    format: ClassVar[ObjectFormat] = ObjectFormat()
    delimiters: ClassVar[tuple[str, str] | None] = None
    """Texts around a single object, if they are always the same."""
    between: ClassVar[str | None] = None
    """Text between several objects within the delimiters; None: there is only one."""

    @classmethod
    def call_delimiters(cls, name: str) -> CallDelimiters | None:
        if cls.delimiters is None:
            return None
        before, after = cls.delimiters
        return CallDelimiters(cls.opens[0], before + cls._head(name), "}" + after)

    @classmethod
    def strict_structural_tag(
        cls, tools: structural_tags.Tools
    ) -> structural_tags.StructuralTag | None:
        if cls.delimiters is None:
            return None
        before, after = cls.delimiters
        objects = structural_tags.calls(cls.strict_objects(tools), cls.between)
        inside = before.removeprefix(cls.opens[0])
        return structural_tags.free_text(
            cls.opens, [structural_tags.tag(tag + inside, objects, after) for tag in cls.opens]
        )

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag | None:
        if cls.delimiters is None:
            return None
        one = structural_tags.either(*cls.strict_objects(tools))
        if cls.between is None:
            return structural_tags.answer(structural_tags.up_to(cls._delimited(one), most))
        gap = structural_tags.sequence(*structural_tags.loose(cls.between))
        return structural_tags.answer(cls._delimited(structural_tags.up_to(one, most, gap)))

    @classmethod
    def _delimited(cls, objects: structural_tags.StructuralTag) -> structural_tags.StructuralTag:
        """Objects between the format's tags."""
        assert cls.delimiters is not None
        before, after = cls.delimiters
        inside = before.removeprefix(cls.opens[0]).strip()
        tags = structural_tags.either(*(structural_tags.const(tag + inside) for tag in cls.opens))
        return structural_tags.sequence(
            tags,
            structural_tags.SPACE,
            objects,
            structural_tags.SPACE,
            structural_tags.const(after.strip()),
        )

    @classmethod
    def strict_objects(cls, tools: structural_tags.Tools) -> list[structural_tags.StructuralTag]:
        """A call of each tool, as an object."""
        return [
            structural_tags.tag(cls._head(name), structural_tags.json_schema(schema), "}")
            for name, schema in tools.items()
        ]

    @classmethod
    def _head(cls, name: str) -> str:
        return f'{{"name": {spell_string(name)}, "{cls.format.arguments[0]}": '

    def calls(self, tag: str) -> Steps[None]:
        yield from self.objects()

    def objects(self) -> Steps[None]:
        """The objects of a section, and its closing tag."""
        yield from self.source.space()
        if self.format.array:
            yield from self.source.expect("[")
            yield from self.object_list()
        else:
            yield from self._sequence()
        if self.format.close:
            yield from self.source.space()
            yield from self.source.expect(*self.format.close)

    def object_list(self) -> Steps[None]:
        """Behind the opening bracket: objects and the closing bracket."""
        while True:
            yield from self.source.space()
            yield from self.object_call()
            yield from self.source.space()
            if (yield from self.source.expect(",", "]")) == "]":
                return
            self.next_call()

    def _sequence(self) -> Steps[None]:
        separator = self.format.separator
        yield from self.object_call()
        while separator is not None:
            yield from self.source.space()
            if separator and not (yield from self.source.accept(separator)):
                return
            yield from self.source.space()
            if (yield from self.source.peek()) != "{":
                return
            self.next_call()
            yield from self.object_call()

    def object_call(self) -> Steps[None]:
        """One object."""
        source = self.source
        name, given = "", False
        held: list[str] | None = None
        yield from source.expect("{")
        separator = "{"
        while separator != "}":
            yield from source.space()
            if separator == "{" and (yield from source.accept("}")):
                break
            key = yield from json_string(source)
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            if key == "name" and not name:
                name = yield from json_string(source)
                if not name:
                    raise ParseError
                if held is not None:
                    self.whole_call(name, "".join(held))
                    given = True
            elif key in self.format.arguments and not given and held is None:
                if name:
                    yield from self.object_arguments(name)
                    given = True
                else:
                    held = []
                    yield from json_object(source, held.append)
            elif self.format.others is None or key in self.format.others:
                yield from json_value(source, drop)
            else:
                raise ParseError
            yield from source.space()
            separator = yield from source.expect(",", "}")
        if not given:
            if not name or not self.format.arguments_optional:
                raise ParseError
            self.whole_call(name, "{}")
