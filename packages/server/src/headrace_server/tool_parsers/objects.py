"""Formats that write a call as one JSON object: ``{"name": ..., "arguments": {...}}``.

One object or several, bare or in a list, between marks or without any: :class:`ObjectFormat` says
which. Name and arguments may come in either order; arguments are given away as they come once the
name is known. Other members of the object are read and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_core.text import CallFrame
from headrace_server.source import Broken, Steps
from headrace_server.tool_parsers import forms
from headrace_server.tool_parsers.json_text import json_object, json_string, json_value
from headrace_server.tool_parsers.machine import Machine, drop
from headrace_server.tool_parsers.schema_values import spell_string


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """How objects stand in a section."""

    array: bool = False
    """A JSON list of objects."""
    separator: str | None = None
    """What stands between several objects outside of a list; "" for white space only; None: a
    section has one object."""
    close: tuple[str, ...] = ()
    """Marks that end a section."""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    """Members that hold the arguments."""
    arguments_optional: bool = False
    """An object without them is a call without arguments."""
    others: tuple[str, ...] | None = None
    """Other members that an object may have; None: any. Where no mark says that calls follow, this
    keeps JSON that is an answer from being held until its end."""


class ObjectsParser(Machine):
    """A format given by an :class:`ObjectFormat`."""

    format: ClassVar[ObjectFormat] = ObjectFormat()
    frame: ClassVar[tuple[str, str] | None] = None
    """What stands around a single object, if that is always the same."""
    between: ClassVar[str | None] = None
    """What stands between several in one frame; None: a frame has one."""

    @classmethod
    def call_frame(cls, name: str) -> CallFrame | None:
        if cls.frame is None:
            return None
        before, after = cls.frame
        return CallFrame(cls.opens[0], before + cls._head(name), "}" + after)

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form | None:
        if cls.frame is None:
            return None
        before, after = cls.frame
        objects = forms.calls(cls.strict_objects(tools), cls.between)
        inside = before.removeprefix(cls.opens[0])
        return forms.free_text(
            cls.opens, [forms.tag(mark + inside, objects, after) for mark in cls.opens]
        )

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form | None:
        if cls.frame is None:
            return None
        one = forms.either(*cls.strict_objects(tools))
        if cls.between is None:
            return forms.answer(forms.several(cls._framed(one), most))
        gap = forms.sequence(*forms.loose(cls.between))
        return forms.answer(cls._framed(forms.several(one, most, gap)))

    @classmethod
    def _framed(cls, objects: forms.Form) -> forms.Form:
        """Objects between the format's tags."""
        assert cls.frame is not None
        before, after = cls.frame
        inside = before.removeprefix(cls.opens[0]).strip()
        marks = forms.either(*(forms.const(mark + inside) for mark in cls.opens))
        return forms.sequence(marks, forms.SPACE, objects, forms.SPACE, forms.const(after.strip()))

    @classmethod
    def strict_objects(cls, tools: forms.Tools) -> list[forms.Form]:
        """A call of each tool, as an object."""
        return [
            forms.tag(cls._head(name), forms.schema_form(schema), "}")
            for name, schema in tools.items()
        ]

    @classmethod
    def _head(cls, name: str) -> str:
        return f'{{"name": {spell_string(name)}, "{cls.format.arguments[0]}": '

    def calls(self, mark: str) -> Steps[None]:
        yield from self.objects()

    def objects(self) -> Steps[None]:
        """The objects of a section, and its closing mark."""
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
                    raise Broken
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
                raise Broken
            yield from source.space()
            separator = yield from source.expect(",", "}")
        if not given:
            if not name or not self.format.arguments_optional:
                raise Broken
            self.whole_call(name, "{}")
