"""Formats that write a call's name into a frame, and its arguments as JSON behind it.

:class:`FrameFormat` holds a format's marks; Mistral's, which has three spellings, has a class.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_core.text import CallFrame
from headrace_server.source import Steps
from headrace_server.tool_parsers import forms
from headrace_server.tool_parsers.machine import Machine
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


@dataclass(frozen=True, slots=True)
class FrameFormat:
    """The marks of a frame, in the order in which they come."""

    section: str
    call: str
    kind: str = ""
    """What stands between a call's mark and its name."""
    name_end: str = ""
    fence: tuple[str, str] | None = None
    """Marks around the arguments, which may be missing."""
    call_end: str = ""
    section_end: str = ""


class FramesParser(Machine):
    """A format given by a :class:`FrameFormat`. A section's own marks may be missing."""

    format: ClassVar[FrameFormat]
    needs_special_tokens = True

    def calls(self, mark: str) -> Steps[None]:
        form, source = self.format, self.source
        if mark == form.section:
            yield from source.space()
            yield from source.expect(form.call)
        while True:
            yield from self._call()
            yield from source.space()
            if (yield from source.expect(form.call, form.section_end)) == form.section_end:
                return
            self.next_call()

    def _call(self) -> Steps[None]:
        form, source = self.format, self.source
        if form.kind:
            yield from source.expect(form.kind)
        name = yield from self.name()
        yield from source.space(" ")
        yield from source.expect(form.name_end)
        yield from source.space()
        fenced = form.fence and (yield from source.accept(form.fence[0]))
        yield from source.space()
        yield from self.object_arguments(self.name_of(name))
        yield from source.space()
        if fenced and form.fence:
            yield from source.expect(form.fence[1])
            yield from source.space()
        yield from source.expect(form.call_end)

    @classmethod
    def call_frame(cls, name: str) -> CallFrame | None:
        form = cls.format
        opening, closing = (f"{form.fence[0]}\n", f"\n{form.fence[1]}") if form.fence else ("", "")
        before = form.section + form.call + form.kind + name + form.name_end + opening
        return CallFrame(form.section, before, closing + form.call_end + form.section_end)

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form:
        form = cls.format
        found = [cls._strict_call(*tool) for tool in tools.items()]
        section = forms.tag(form.section, forms.calls(found, ""), form.section_end)
        return forms.free_text([form.section, form.call], [section, *found])

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        form = cls.format
        one = forms.either(*(cls._strict_call(*tool) for tool in tools.items()))
        section = forms.sequence(forms.SPACE, forms.several(one, most))
        return forms.answer(forms.tag(form.section, section, form.section_end))

    @classmethod
    def _strict_call(cls, name: str, schema: Mapping[str, Any] | None) -> forms.Form:
        form = cls.format
        opening, closing = (f"{form.fence[0]}\n", f"\n{form.fence[1]}") if form.fence else ("", "")
        arguments = forms.tag(
            form.name_end + opening, forms.schema_form(schema), closing + form.call_end
        )
        inside = forms.sequence(*cls.strict_name(name), arguments, forms.SPACE)
        return forms.tag(form.call + form.kind, inside)

    @classmethod
    def strict_name(cls, name: str) -> Sequence[forms.Form]:
        """How a frame names a function."""
        return [forms.const(name)]

    def name_of(self, text: str) -> str:
        """The function's name, of what stands in a frame."""
        return text


class DeepSeekV3ToolParser(FramesParser):
    """DeepSeek V3-0324 and R1-0528: kind, name, and fenced arguments in a frame."""

    opens = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closes = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
    format = FrameFormat(
        section="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>",
        kind="function<｜tool▁sep｜>",
        name_end="\n",
        fence=("```json", "```"),
        call_end="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
    )


class DeepSeekV31ToolParser(FramesParser):
    """DeepSeek V3.1: name and bare arguments in a frame."""

    opens = DeepSeekV3ToolParser.opens
    closes = DeepSeekV3ToolParser.closes
    format = FrameFormat(
        section="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
    )


class KimiK2ToolParser(FramesParser):
    """Kimi K2: ``functions.NAME:IDX`` is a call's id and says its name."""

    opens = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closes = ("<|tool_calls_section_end|>", "<|tool_call_end|>")
    format = FrameFormat(
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
        """The id that the current frame gives; "" if none."""

    @classmethod
    def call_frame(cls, name: str) -> CallFrame | None:
        return None  # A frame counts the calls.

    @classmethod
    def strict_name(cls, name: str) -> Sequence[forms.Form]:
        return [forms.const(f"functions.{name}:"), forms.regex("[0-9]{1,3}")]

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


class MistralToolParser(ObjectsParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of objects, or before each call's name and arguments.

    Tokenizers since version 11 write ``[TOOL_CALLS]name{...}``, later ones ``[ARGS]`` between
    name and arguments, and perhaps ``[CALL_ID]`` and an id before that.
    """

    needs_special_tokens = True
    opens = ("[TOOL_CALLS]",)
    format = ObjectFormat(array=True, arguments_optional=True)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._ids: list[str] = []
        self._written = ""

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form:
        """In either dialect: which it is the tokenizer's version says, not the parser."""
        mark = cls.opens[0]
        identity = forms.sequence(forms.const("[CALL_ID]"), forms.regex("[A-Za-z0-9]{9}"))
        tags = [forms.tag(f"{mark}[", forms.calls(cls.strict_objects(tools), ", "), "]")]
        for name, schema in tools.items():
            arguments = forms.schema_form(schema)
            marked = forms.tag("[ARGS]", arguments)
            tags.append(
                forms.tag(
                    mark + name,
                    forms.either(arguments, marked, forms.sequence(identity, marked)),
                )
            )
        return forms.free_text([mark], tags)

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        """In either dialect, see :meth:`strict_form`."""
        mark = forms.const(cls.opens[0])
        objects = forms.either(*cls.strict_objects(tools))
        listed = forms.several(objects, most, forms.sequence(*forms.loose(", ")))
        identity = forms.sequence(forms.const("[CALL_ID]"), forms.regex("[A-Za-z0-9]{9}"))
        marked = forms.sequence(forms.either(identity, forms.const("")), forms.const("[ARGS]"))
        middle = forms.either(marked, forms.const(""))
        named = [
            forms.sequence(forms.const(name), middle, forms.schema_form(schema))
            for name, schema in tools.items()
        ]
        return forms.answer(
            forms.either(
                forms.sequence(
                    mark, forms.SPACE, forms.const("["), listed, forms.SPACE, forms.const("]")
                ),
                forms.several(forms.sequence(mark, forms.either(*named)), most),
            )
        )

    def calls(self, mark: str) -> Steps[None]:
        source = self.source
        yield from source.space()
        self._written = ""
        if (yield from source.peek()) == "[":
            yield from self.objects()
            return
        name = yield from self.name()
        yield from source.space()
        if (yield from source.accept("[CALL_ID]")):
            self._written, _ = yield from source.before(("[ARGS]",), limit=64)
        else:
            yield from source.accept("[ARGS]")
        yield from source.space()
        yield from self.object_arguments(name)

    def open_call(self, name: str) -> None:
        super().open_call(name)
        self._ids.append(self._written if _is_id(self._written) else _new_id())

    def call_id(self, index: int, name: str) -> str | None:
        """Nine letters and digits: other ids are refused by the model's template."""
        while len(self._ids) <= index:
            self._ids.append(_new_id())
        return self._ids[index]


_ALPHABET = string.ascii_letters + string.digits


def _new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _is_id(text: str) -> bool:
    return len(text) == 9 and text.isascii() and text.isalnum()
