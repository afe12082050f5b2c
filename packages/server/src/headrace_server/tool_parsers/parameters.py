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
from headrace_server.tool_parsers.machine import MAX_NAME, Machine
from headrace_server.tool_parsers.schema_values import SchemaValues, spell, spell_string


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


class ParametersParser(Machine):
    """A format given by a :class:`ParameterFormat`. A section's own marks may be missing."""

    format: ClassVar[ParameterFormat]

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
        pieces: list[str] = []
        if not (yield from source.until((form.value_end,), pieces.append)):
            raise Broken
        text = "".join(pieces)
        if form.trim_newlines:
            text = text.removeprefix("\n").removesuffix("\n")
        key, said = key.strip(), form.key_end[mark]
        if said is None:
            return key, self._values.spell(function, key, text)
        return key, spell(text, frozenset({"string" if said == "string" else "any"}))


class Qwen3XmlToolParser(ParametersParser):
    """Qwen3-Coder: ``<function=F>`` and ``<parameter=K>`` in ``<tool_call>``."""

    needs_special_tokens = True
    opens = ("<tool_call>", "<function=")
    closes = ("</tool_call>", "</function>")
    format = ParameterFormat(
        section="<tool_call>",
        call=("<function=",),
        name_end=(">",),
        key="<parameter=",
        key_end={">": None},
        value_end="</parameter>",
        call_end=("</function>",),
        section_end="</tool_call>",
        trim_newlines=True,
    )


class SeedOssToolParser(ParametersParser):
    """Seed-OSS: as Qwen3-Coder's, in ``<seed:tool_call>``."""

    needs_special_tokens = True
    opens = ("<seed:tool_call>", "<function=")
    closes = ("</seed:tool_call>", "</function>")
    format = ParameterFormat(
        section="<seed:tool_call>",
        call=("<function=",),
        name_end=(">",),
        key="<parameter=",
        key_end={">": None},
        value_end="</parameter>",
        call_end=("</function>",),
        section_end="</seed:tool_call>",
        trim_newlines=True,
    )


class MiniMaxM2ToolParser(ParametersParser):
    """MiniMax M2: ``<invoke name="F">`` and ``<parameter name="K">``."""

    needs_special_tokens = True
    opens = ("<minimax:tool_call>",)
    closes = ("</minimax:tool_call>", "</invoke>")
    format = ParameterFormat(
        section="<minimax:tool_call>",
        call=('<invoke name="',),
        name_end=('">',),
        key='<parameter name="',
        key_end={'">': None},
        value_end="</parameter>",
        call_end=("</invoke>",),
        section_end="</minimax:tool_call>",
        trim_newlines=True,
    )


class DeepSeekV32ToolParser(ParametersParser):
    """DeepSeek V3.2: as MiniMax M2's with a prefix; a key says whether its value is a string."""

    needs_special_tokens = True
    opens = ("<｜DSML｜function_calls>",)
    closes = ("</｜DSML｜function_calls>", "</｜DSML｜invoke>")
    format = ParameterFormat(
        section="<｜DSML｜function_calls>",
        call=('<｜DSML｜invoke name="',),
        name_end=('">',),
        key='<｜DSML｜parameter name="',
        key_end={'" string="true">': "string", '" string="false">': "json", '">': None},
        value_end="</｜DSML｜parameter>",
        call_end=("</｜DSML｜invoke>",),
        section_end="</｜DSML｜function_calls>",
    )


class Step3ToolParser(ParametersParser):
    """Step 3: calls in frames, written as MiniMax M2's with a prefix."""

    needs_special_tokens = True
    opens = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    closes = ("<｜tool_calls_end｜>", "<｜tool_call_end｜>")
    format = ParameterFormat(
        section="<｜tool_calls_begin｜>",
        call=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="'),
        name_end=('">',),
        key='<steptml:parameter name="',
        key_end={'">': None},
        value_end="</steptml:parameter>",
        call_end=("</steptml:invoke>", "<｜tool_call_end｜>"),
        section_end="<｜tool_calls_end｜>",
    )


class Glm45ToolParser(ParametersParser):
    """GLM 4.5 to 4.7: a name, and keys and values each between their own marks.

    The new line behind the name may be missing, and so may the parameters, as in 4.7.
    """

    needs_special_tokens = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    format = ParameterFormat(
        call=("<tool_call>",),
        name_end=("\n", "<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end={"</arg_key>": None},
        value="<arg_value>",
        value_end="</arg_value>",
        call_end=("</tool_call>",),
    )
