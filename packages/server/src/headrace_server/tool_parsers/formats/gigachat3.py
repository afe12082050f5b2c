"""GigaChat 3: ``function call``, perhaps ``<|role_sep|>`` and a new line, an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class GigaChat3ToolParser(ObjectsParser):
    """GigaChat 3: ``function call``, perhaps ``<|role_sep|>`` and a new line, an object.

    ``<|message_sep|>`` before it belongs to it.
    """

    needs_special_tokens = True
    opens = ("<|message_sep|>", "function call")
    format = ObjectFormat()

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        one = structural_tags.either(*cls.strict_objects(tools))
        tag = structural_tags.sequence(structural_tags.const(cls.opens[0]), structural_tags.SPACE)
        head = structural_tags.const("function call<|role_sep|>")
        call = structural_tags.sequence(
            structural_tags.either(tag, structural_tags.const("")),
            head,
            structural_tags.SPACE,
            one,
        )
        return structural_tags.answer(structural_tags.up_to(call, most))

    def calls(self, tag: str) -> Steps[None]:
        if tag != "function call":
            yield from self.source.space()
            yield from self.source.expect("function call")
        yield from self.source.accept("<|role_sep|>")
        yield from self.objects()
