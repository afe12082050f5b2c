"""xLAM 2: a list of objects, bare, behind ``</think>`` or ``[TOOL_CALLS]``, fenced or tagged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class XlamToolParser(ObjectsParser):
    """xLAM 2: a list of objects, bare, behind ``</think>`` or ``[TOOL_CALLS]``, fenced or tagged.

    A bare one must be the first thing in the answer.
    """

    needs_special_tokens = True
    opens = ("[TOOL_CALLS]", "<tool_call>", "```", "</think>")
    closes = ("</tool_call>",)
    format = ObjectFormat(array=True, arguments_optional=True, others=("type", "id"))

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        """A bare list, as xLAM 2's own prompt asks for, or behind the tag of earlier models."""
        one = structural_tags.either(*cls.strict_objects(tools))
        calls = structural_tags.up_to(
            one, most, structural_tags.sequence(*structural_tags.loose(", "))
        )
        tag = structural_tags.either(structural_tags.const(cls.opens[0]), structural_tags.const(""))
        bare = (
            structural_tags.const("["),
            structural_tags.SPACE,
            calls,
            structural_tags.SPACE,
            structural_tags.const("]"),
        )
        return structural_tags.answer(tag, structural_tags.SPACE, *bare)

    def begin(self) -> Steps[None]:
        yield from self.source.space()
        yield from self.calls((yield from self.source.accept(*self.opens)))

    def calls(self, tag: str) -> Steps[None]:
        if tag == "</think>":
            self.say()
        elif tag == "```":
            yield from self.source.accept("json")
        yield from self.objects()
        close = {"```": "```", "<tool_call>": "</tool_call>"}.get(tag)
        if close:
            yield from self.source.space()
            yield from self.source.expect(close)
