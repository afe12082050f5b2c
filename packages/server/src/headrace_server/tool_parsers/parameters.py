"""Formats that write each parameter of a call between tags, as bare text.

:class:`ParameterFormat` holds a format's tags. The text of a value says no type: the tool's
schema does (:mod:`headrace_server.tool_parsers.schema_values`), so a value is given away when it
is complete, and a call when its first parameter begins or its end has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_server.parsing.text_scanner import ParseError, Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.json_values import JsonScanner
from headrace_server.tool_parsers.schema_values import SchemaValues, spell, spell_string
from headrace_server.tool_parsers.streaming_parser import MAX_NAME, StreamingParser
from headrace_server.tool_parsers.value_tags import (
    BareText,
    Parameter,
    need_parameters,
    parameters,
    says_nothing,
)


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """The tags of a format. White space may stand between any two of them."""

    call: tuple[str, ...]
    """Texts before a name."""
    name_end: tuple[str, ...]
    """Texts that end a name; the tag of a key or of the call's end may be among them."""
    key: str
    key_end: Mapping[str, str | None]
    """Text that ends a key -> the type that it says, if any: string, or json."""
    value_end: str
    call_end: tuple[str, ...]
    section: str = ""
    """Text before the first call; "" if there is none."""
    section_end: str = ""
    value: str = ""
    """Text between a key's end and its value, white space aside; "" if there is none."""
    trim_newlines: bool = False
    """One new line at each end of a value belongs to the format."""
    bare: bool = True
    """Calls may come without the section's tags."""
    alone: bool = False
    """A model writes each call into a section of its own."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Marks with which calls begin."""
        return (*filter(None, [self.section]), *(self.call[:1] if self.bare else ()))

    @property
    def closes(self) -> tuple[str, ...]:
        """Marks with which they end."""
        return (*filter(None, [self.section_end]), self.call_end[-1])


class ParametersParser(StreamingParser):
    """A format given by a :class:`ParameterFormat`, whose tags are special tokens."""

    format: ClassVar[ParameterFormat]
    needs_special_tokens = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "format" in vars(cls):
            cls.opens, cls.closes = cls.format.opens, cls.format.closes

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._values = SchemaValues(tools)

    def calls(self, tag: str) -> Steps[None]:
        fmt, source = self.format, self.source
        yield from self._tags(fmt.call if tag == fmt.section else fmt.call[1:])
        while True:
            yield from self._call()
            if not fmt.section:
                return
            yield from source.space()
            if (yield from source.expect(fmt.call[0], fmt.section_end)) == fmt.section_end:
                return
            self.next_call()
            yield from self._tags(fmt.call[1:])

    def _tags(self, tags: Sequence[str]) -> Steps[None]:
        for tag in tags:
            yield from self.source.space()
            yield from self.source.expect(tag)

    def _call(self) -> Steps[None]:
        fmt, source = self.format, self.source
        name = yield from self.name()
        if fmt.key in fmt.name_end:
            yield from source.space(" \t\r")
        tag = yield from source.expect(*fmt.name_end)
        end, separator = fmt.call_end[0], "{"
        if tag not in (fmt.key, end):
            yield from source.space()
            tag = yield from source.expect(fmt.key, end)
        self.open_call(name)
        while tag == fmt.key:
            key, value = yield from self._parameter(name)
            self.arguments(f"{separator}{spell_string(key)}: {value}")
            separator = ", "
            yield from source.space()
            tag = yield from source.expect(fmt.key, end)
        self.arguments("{}" if separator == "{" else "}")
        self.close_call()
        yield from self._tags(fmt.call_end[1:])

    def _parameter(self, function: str) -> Steps[tuple[str, str]]:
        """A key and its value as JSON, behind the key's tag."""
        fmt, source = self.format, self.source
        key, tag = yield from source.before(tuple(fmt.key_end), limit=MAX_NAME)
        if fmt.value:
            yield from source.space()
            yield from source.expect(fmt.value)
        key, said = key.strip(), fmt.key_end[tag]
        types = self._values.types(function, key) if said is None else frozenset({said})
        text = yield from self._value(is_json=not types & {"string", "any"})
        if fmt.trim_newlines:
            text = text.removeprefix("\n").removesuffix("\n")
        if said is None:
            return key, spell(text, types)
        return key, spell(text, frozenset({"string" if said == "string" else "any"}))

    def _value(self, *, is_json: bool) -> Steps[str]:
        """The text of a value, up to and with its end.

        Args:
            is_json: the value is JSON, not a bare string; within a string of it the end tag is text.
        """
        pieces: list[str] = []
        scanner, num_scanned = JsonScanner(), 0
        while True:
            if not (yield from self.source.until((self.format.value_end,), pieces.append)):
                raise ParseError
            if not is_json:
                break
            scanner.scan("".join(pieces[num_scanned:]))
            if not scanner.in_string:
                break
            num_scanned = len(pieces)
            pieces.append(self.format.value_end)
        return "".join(pieces)

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        fmt = cls.format
        found = [
            structural_tags.tag(fmt.call[0], cls._strict_call(*tool)) for tool in tools.items()
        ]
        if not fmt.section:
            return structural_tags.free_text(fmt.opens, found)
        section = structural_tags.sequence(structural_tags.SPACE, structural_tags.calls(found, ""))
        tags = [structural_tags.tag(fmt.section, section, fmt.section_end)]
        return structural_tags.free_text(fmt.opens, tags + found if fmt.bare else tags)

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        fmt = cls.format
        for tool in tools.items():
            need_parameters(*tool)
        one = structural_tags.either(
            *(structural_tags.tag(fmt.call[0], cls._strict_call(*tool)) for tool in tools.items())
        )
        if not fmt.section:
            return structural_tags.answer(structural_tags.up_to(one, most))
        inside = one if fmt.alone else structural_tags.up_to(one, most)
        section = structural_tags.tag(
            fmt.section, structural_tags.sequence(structural_tags.SPACE, inside), fmt.section_end
        )
        if fmt.alone:
            return structural_tags.answer(structural_tags.up_to(section, most))
        return structural_tags.answer(section)

    @classmethod
    def _strict_call(
        cls, name: str, schema: Mapping[str, Any] | None
    ) -> structural_tags.StructuralTag:
        """A call behind its first tag, and the white space behind it."""
        fmt = cls.format
        parts: list[structural_tags.StructuralTag] = []
        for tag in fmt.call[1:]:
            parts += [structural_tags.SPACE, structural_tags.const(tag)]
        parts.append(structural_tags.const(name))
        parts.append(
            structural_tags.regex(r"\n?")
            if fmt.key in fmt.name_end
            else structural_tags.const(fmt.name_end[0])
        )
        end = fmt.call_end[0]
        if schema is None:
            parts.append(structural_tags.tag("", structural_tags.FREE, end))
        else:
            for one in parameters(name, schema):
                parameter = structural_tags.sequence(
                    structural_tags.SPACE, *cls._strict_parameter(name, one)
                )
                parts.append(
                    parameter
                    if one.required
                    else structural_tags.either(parameter, structural_tags.const(""))
                )
            parts += [structural_tags.SPACE, structural_tags.const(end)]
        for tag in fmt.call_end[1:]:
            parts += [structural_tags.SPACE, structural_tags.const(tag)]
        return structural_tags.sequence(*parts, structural_tags.SPACE)

    @classmethod
    def _strict_parameter(
        cls, tool: str, parameter: Parameter
    ) -> list[structural_tags.StructuralTag]:
        fmt, key = cls.format, parameter.name
        if (
            not key
            or key != key.strip()
            or len(key) > MAX_NAME
            or any(m in key for m in fmt.key_end)
        ):
            structural_tags.not_strict(tool, parameter.pointer, "its format cannot write this name")
        value, ends = BareText(fmt.value_end, fmt.trim_newlines).tag, list(fmt.key_end.items())
        tag = next((tag for tag, said in ends if said is None), "")
        content: structural_tags.StructuralTag | None
        if len(ends) > 1:  # the key says the type, so that anything can be written as JSON
            text = parameter.schema == {"type": "string"} or _is_plain_string(parameter.schema)
            tag = next(m for m, said in ends if said == ("string" if text else "json"))
            content = None if text else structural_tags.json_schema(parameter.schema)
        else:
            content = value(tool, parameter)
        before = fmt.key + key + tag
        middle = [structural_tags.const(before), structural_tags.SPACE] if fmt.value else []
        begin = fmt.value or before
        return [
            *middle,
            structural_tags.tag(
                begin, structural_tags.FREE if content is None else content, fmt.value_end
            ),
        ]


def _is_plain_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and says_nothing(schema) and schema.get("type") == "string"


def function_tags(name: str) -> ParameterFormat:
    """``<function=F>`` and ``<parameter=K>`` in a section of a name."""
    return ParameterFormat(
        section=f"<{name}>",
        call=("<function=",),
        name_end=(">",),
        key="<parameter=",
        key_end={">": None},
        value_end="</parameter>",
        call_end=("</function>",),
        section_end=f"</{name}>",
        trim_newlines=True,
        alone=True,
    )


def invoke_tags(prefix: str, section: tuple[str, str], **more: Any) -> ParameterFormat:
    """``<invoke name="F">`` and ``<parameter name="K">``, both with a prefix, in a section."""
    tags: dict[str, Any] = {
        "call": (f'<{prefix}invoke name="',),
        "call_end": (f"</{prefix}invoke>",),
        "key_end": {'">': None},
        "bare": False,
    }
    return ParameterFormat(
        section=section[0],
        name_end=('">',),
        key=f'<{prefix}parameter name="',
        value_end=f"</{prefix}parameter>",
        section_end=section[1],
        **(tags | more),
    )
