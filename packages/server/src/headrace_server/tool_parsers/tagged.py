"""Formats of :mod:`objects <headrace_server.tool_parsers.objects>`, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_server.source import Steps
from headrace_server.tool_parsers import forms
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser

_THINK = ("<think>", "</think>")


class LongCatToolParser(ObjectsParser):
    """LongCat-Flash: ``<longcat_tool_call>`` object ``</longcat_tool_call>``."""

    needs_special_tokens = True
    opens = ("<longcat_tool_call>",)
    closes = ("</longcat_tool_call>",)
    frame = ("<longcat_tool_call>\n", "\n</longcat_tool_call>")
    format = ObjectFormat(close=closes, arguments=("arguments",), arguments_optional=True)


class Ernie45ToolParser(ObjectsParser):
    """ERNIE 4.5 Thinking: ``<tool_call>`` object ``</tool_call>``."""

    needs_special_tokens = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    frame = ("<tool_call>\n", "\n</tool_call>")
    format = ObjectFormat(close=closes, arguments_optional=True)


class GraniteToolParser(ObjectsParser):
    """Granite 3: ``<|tool_call|>`` (3.0) or ``<tool_call>`` (3.1), then a list of objects."""

    needs_special_tokens = True
    opens = ("<|tool_call|>", "<tool_call>")
    frame = ("<|tool_call|>[", "]")
    between = ", "
    format = ObjectFormat(array=True)


class Granite20bToolParser(ObjectsParser):
    """granite-20b-functioncalling: ``<function_call>`` and an object, for each call."""

    needs_special_tokens = True
    opens = ("<function_call>",)
    frame = ("<function_call> ", "")
    format = ObjectFormat(arguments_optional=True)


class InternLmToolParser(ObjectsParser):
    """InternLM 2.5: ``<|action_start|><|plugin|>`` object ``<|action_end|>``."""

    needs_special_tokens = True
    opens = ("<|action_start|>",)
    closes = ("<|action_end|>",)
    frame = ("<|action_start|><|plugin|>\n", "<|action_end|>\n")
    format = ObjectFormat(close=closes, arguments=("parameters", "arguments"))

    def calls(self, mark: str) -> Steps[None]:
        yield from self.source.space()
        yield from self.source.expect("<|plugin|>")
        yield from self.objects()


class JambaToolParser(ObjectsParser):
    """Jamba 1.5: ``<tool_calls>`` list of objects ``</tool_calls>``."""

    needs_special_tokens = True
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    frame = ("<tool_calls>[\n", "\n]</tool_calls>")
    between = ",\n"
    format = ObjectFormat(array=True, close=closes)


class HunyuanToolParser(ObjectsParser):
    """Hunyuan A13B: as Jamba's; what stands in the reasoning is no call."""

    needs_special_tokens = True
    ignored = _THINK
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    frame = ("<tool_calls>[", "]</tool_calls>")
    between = ", "
    format = ObjectFormat(array=True, close=closes)


class MiniMaxToolParser(ObjectsParser):
    """MiniMax M1: ``<tool_calls>``, an object a line, ``</tool_calls>``, not in the reasoning."""

    needs_special_tokens = True
    ignored = _THINK
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    frame = ("<tool_calls>\n", "\n</tool_calls>")
    between = "\n"
    format = ObjectFormat(separator="", close=closes, arguments_optional=True)


class Phi4MiniToolParser(ObjectsParser):
    """Phi-4-mini: ``functools[``, objects, ``]``."""

    opens = ("functools[",)
    frame = ("functools[", "]")
    between = ", "

    def calls(self, mark: str) -> Steps[None]:
        yield from self.object_list()


class Llama3JsonToolParser(ObjectsParser):
    """Llama 3 and 4: objects with ``;`` between them, behind ``<|python_tag|>``, or bare.

    Bare ones must be the first thing in the answer.
    """

    needs_special_tokens = True
    opens = ("<|python_tag|>",)
    format = ObjectFormat(
        separator=";", arguments=("parameters", "arguments"), others=("type", "id")
    )

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form:
        objects = forms.calls(cls.strict_objects(tools), "; ")
        mark = cls.opens[0]
        # Behind a call another one could follow the text at once.
        return forms.may_begin(objects, "{", mark, forms.tag(mark, objects), ends=True)

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        one = forms.either(*cls.strict_objects(tools))
        mark = forms.either(forms.const(cls.opens[0]), forms.const(""))
        return forms.answer(mark, forms.several(one, most, forms.sequence(*forms.loose("; "))))

    def begin(self) -> Steps[None]:
        yield from self.objects()


class XlamToolParser(ObjectsParser):
    """xLAM 2: a list of objects, bare, behind ``</think>`` or ``[TOOL_CALLS]``, fenced or tagged.

    A bare one must be the first thing in the answer.
    """

    needs_special_tokens = True
    opens = ("[TOOL_CALLS]", "<tool_call>", "```", "</think>")
    closes = ("</tool_call>",)
    format = ObjectFormat(array=True, arguments_optional=True, others=("type", "id"))

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        """A bare list, as xLAM 2's own prompt asks for, or behind the mark of earlier models."""
        one = forms.either(*cls.strict_objects(tools))
        calls = forms.several(one, most, forms.sequence(*forms.loose(", ")))
        mark = forms.either(forms.const(cls.opens[0]), forms.const(""))
        bare = (forms.const("["), forms.SPACE, calls, forms.SPACE, forms.const("]"))
        return forms.answer(mark, forms.SPACE, *bare)

    def begin(self) -> Steps[None]:
        yield from self.source.space()
        yield from self.calls((yield from self.source.accept(*self.opens)))

    def calls(self, mark: str) -> Steps[None]:
        if mark == "</think>":
            self.say()
        elif mark == "```":
            yield from self.source.accept("json")
        yield from self.objects()
        close = {"```": "```", "<tool_call>": "</tool_call>"}.get(mark)
        if close:
            yield from self.source.space()
            yield from self.source.expect(close)


class GigaChat3ToolParser(ObjectsParser):
    """GigaChat 3: ``function call``, perhaps ``<|role_sep|>`` and a new line, an object.

    ``<|message_sep|>`` before it belongs to it.
    """

    needs_special_tokens = True
    opens = ("<|message_sep|>", "function call")
    format = ObjectFormat()

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        one = forms.either(*cls.strict_objects(tools))
        mark = forms.sequence(forms.const(cls.opens[0]), forms.SPACE)
        head = forms.const("function call<|role_sep|>")
        call = forms.sequence(forms.either(mark, forms.const("")), head, forms.SPACE, one)
        return forms.answer(forms.several(call, most))

    def calls(self, mark: str) -> Steps[None]:
        if mark != "function call":
            yield from self.source.space()
            yield from self.source.expect("function call")
        yield from self.source.accept("<|role_sep|>")
        yield from self.objects()
