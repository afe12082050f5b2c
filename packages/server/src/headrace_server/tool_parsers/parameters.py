"""Formats that write each parameter of a call between marks, as bare text.

:class:`ParameterFormat` holds a format's marks. The text of a value says no type: the tool's
schema does (:mod:`headrace_server.tool_parsers.schema_values`), so a value is given away when it
is complete, and a call when its first parameter begins or its end has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_server.source import Broken, Steps
from headrace_server.tool_parsers import forms
from headrace_server.tool_parsers.json_text import JsonScanner
from headrace_server.tool_parsers.machine import MAX_NAME, Machine
from headrace_server.tool_parsers.schema_values import SchemaValues, spell, spell_string
from headrace_server.tool_parsers.value_forms import (
    BareText,
    Parameter,
    need_parameters,
    parameters,
    says_nothing,
)


@dataclass(frozen=True, slots=True)
class ParameterFormat:
    """The marks of a format. White space may stand between any two of them."""

    call: tuple[str, ...]
    """What stands before a name."""
    name_end: tuple[str, ...]
    """What ends a name; the mark of a key or of the call's end may be among them."""
    key: str
    key_end: Mapping[str, str | None]
    """What ends a key -> the type that it says, if any: string, or json."""
    value_end: str
    call_end: tuple[str, ...]
    section: str = ""
    """What stands before the first call; "" if nothing does."""
    section_end: str = ""
    value: str = ""
    """What stands between a key's end and its value, white space aside; "" if nothing does."""
    trim_newlines: bool = False
    """One new line at each end of a value belongs to the format."""
    bare: bool = True
    """Calls may come without the section's marks."""
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


class ParametersParser(Machine):
    """A format given by a :class:`ParameterFormat`, whose marks are special tokens."""

    format: ClassVar[ParameterFormat]
    needs_special_tokens = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "format" in vars(cls):
            cls.opens, cls.closes = cls.format.opens, cls.format.closes

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._values = SchemaValues(tools)

    def calls(self, mark: str) -> Steps[None]:
        form, source = self.format, self.source
        yield from self._marks(form.call if mark == form.section else form.call[1:])
        while True:
            yield from self._call()
            if not form.section:
                return
            yield from source.space()
            if (yield from source.expect(form.call[0], form.section_end)) == form.section_end:
                return
            self.next_call()
            yield from self._marks(form.call[1:])

    def _marks(self, marks: Sequence[str]) -> Steps[None]:
        for mark in marks:
            yield from self.source.space()
            yield from self.source.expect(mark)

    def _call(self) -> Steps[None]:
        form, source = self.format, self.source
        name = yield from self.name()
        if form.key in form.name_end:
            yield from source.space(" \t\r")
        mark = yield from source.expect(*form.name_end)
        end, separator = form.call_end[0], "{"
        if mark not in (form.key, end):
            yield from source.space()
            mark = yield from source.expect(form.key, end)
        self.open_call(name)
        while mark == form.key:
            key, value = yield from self._parameter(name)
            self.arguments(f"{separator}{spell_string(key)}: {value}")
            separator = ", "
            yield from source.space()
            mark = yield from source.expect(form.key, end)
        self.arguments("{}" if separator == "{" else "}")
        self.close_call()
        yield from self._marks(form.call_end[1:])

    def _parameter(self, function: str) -> Steps[tuple[str, str]]:
        """A key and its value as JSON, behind the key's mark."""
        form, source = self.format, self.source
        key, mark = yield from source.before(tuple(form.key_end), limit=MAX_NAME)
        if form.value:
            yield from source.space()
            yield from source.expect(form.value)
        key, said = key.strip(), form.key_end[mark]
        types = self._values.types(function, key) if said is None else frozenset({said})
        text = yield from self._value(is_json=not types & {"string", "any"})
        if form.trim_newlines:
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
                raise Broken
            if not is_json:
                break
            scanner.scan("".join(pieces[num_scanned:]))
            if not scanner.in_string:
                break
            num_scanned = len(pieces)
            pieces.append(self.format.value_end)
        return "".join(pieces)

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form:
        form = cls.format
        found = [forms.tag(form.call[0], cls._strict_call(*tool)) for tool in tools.items()]
        if not form.section:
            return forms.free_text(form.opens, found)
        section = forms.sequence(forms.SPACE, forms.calls(found, ""))
        tags = [forms.tag(form.section, section, form.section_end)]
        return forms.free_text(form.opens, tags + found if form.bare else tags)

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        form = cls.format
        for tool in tools.items():
            need_parameters(*tool)
        one = forms.either(
            *(forms.tag(form.call[0], cls._strict_call(*tool)) for tool in tools.items())
        )
        if not form.section:
            return forms.answer(forms.several(one, most))
        inside = one if form.alone else forms.several(one, most)
        section = forms.tag(form.section, forms.sequence(forms.SPACE, inside), form.section_end)
        if form.alone:
            return forms.answer(forms.several(section, most))
        return forms.answer(section)

    @classmethod
    def _strict_call(cls, name: str, schema: Mapping[str, Any] | None) -> forms.Form:
        """A call behind its first mark, and the white space behind it."""
        form = cls.format
        parts: list[forms.Form] = []
        for mark in form.call[1:]:
            parts += [forms.SPACE, forms.const(mark)]
        parts.append(forms.const(name))
        parts.append(
            forms.regex(r"\n?") if form.key in form.name_end else forms.const(form.name_end[0])
        )
        end = form.call_end[0]
        if schema is None:
            parts.append(forms.tag("", forms.FREE, end))
        else:
            for one in parameters(name, schema):
                parameter = forms.sequence(forms.SPACE, *cls._strict_parameter(name, one))
                parts.append(
                    parameter if one.required else forms.either(parameter, forms.const(""))
                )
            parts += [forms.SPACE, forms.const(end)]
        for mark in form.call_end[1:]:
            parts += [forms.SPACE, forms.const(mark)]
        return forms.sequence(*parts, forms.SPACE)

    @classmethod
    def _strict_parameter(cls, tool: str, parameter: Parameter) -> list[forms.Form]:
        form, key = cls.format, parameter.name
        if (
            not key
            or key != key.strip()
            or len(key) > MAX_NAME
            or any(m in key for m in form.key_end)
        ):
            forms.not_strict(tool, parameter.pointer, "its format cannot write this name")
        value, ends = BareText(form.value_end, form.trim_newlines).form, list(form.key_end.items())
        mark = next((mark for mark, said in ends if said is None), "")
        content: forms.Form | None
        if len(ends) > 1:  # the key says the type, so that anything can be written as JSON
            text = parameter.schema == {"type": "string"} or _is_plain_string(parameter.schema)
            mark = next(m for m, said in ends if said == ("string" if text else "json"))
            content = None if text else forms.schema_form(parameter.schema)
        else:
            content = value(tool, parameter)
        before = form.key + key + mark
        middle = [forms.const(before), forms.SPACE] if form.value else []
        begin = form.value or before
        return [
            *middle,
            forms.tag(begin, forms.FREE if content is None else content, form.value_end),
        ]


def _is_plain_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and says_nothing(schema) and schema.get("type") == "string"


def _functions(name: str) -> ParameterFormat:
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


def _invocations(prefix: str, section: tuple[str, str], **more: Any) -> ParameterFormat:
    """``<invoke name="F">`` and ``<parameter name="K">``, both with a prefix, in a section."""
    marks: dict[str, Any] = {
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
        **(marks | more),
    )


class Qwen3XmlToolParser(ParametersParser):
    """Qwen3-Coder: ``<function=F>`` and ``<parameter=K>`` in ``<tool_call>``."""

    format = _functions("tool_call")


class SeedOssToolParser(ParametersParser):
    """Seed-OSS: as Qwen3-Coder's, in ``<seed:tool_call>``."""

    format = _functions("seed:tool_call")


class MiniMaxM2ToolParser(ParametersParser):
    """MiniMax M2: ``<invoke name="F">`` and ``<parameter name="K">``."""

    format = _invocations("", ("<minimax:tool_call>", "</minimax:tool_call>"), trim_newlines=True)


class DeepSeekV32ToolParser(ParametersParser):
    """DeepSeek V3.2: as MiniMax M2's with a prefix; a key says whether its value is a string."""

    format = _invocations(
        "｜DSML｜",
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        key_end={'" string="true">': "string", '" string="false">': "json", '">': None},
    )


class Step3ToolParser(ParametersParser):
    """Step 3: calls in frames, written as MiniMax M2's with a prefix."""

    format = _invocations(
        "steptml:",
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="'),
        call_end=("</steptml:invoke>", "<｜tool_call_end｜>"),
        bare=True,
    )


class Glm45ToolParser(ParametersParser):
    """GLM 4.5 to 4.7: a name, and keys and values each between their own marks.

    The new line behind the name may be missing, and so may the parameters, as in 4.7.
    """

    format = ParameterFormat(
        call=("<tool_call>",),
        name_end=("\n", "<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end={"</arg_key>": None},
        value="<arg_value>",
        value_end="</arg_value>",
        call_end=("</tool_call>",),
    )
