"""Llama 3 and 4: objects with ``;`` between them, behind ``<|python_tag|>``, or bare.

Users name it ``llama3_json`` and ``llama4_json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


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
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        objects = structural_tags.calls(cls.strict_objects(tools), "; ")
        tag = cls.opens[0]
        # Behind a call another one could follow the text at once.
        return structural_tags.may_begin(
            objects, "{", tag, structural_tags.tag(tag, objects), ends=True
        )

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        one = structural_tags.either(*cls.strict_objects(tools))
        tag = structural_tags.either(structural_tags.const(cls.opens[0]), structural_tags.const(""))
        return structural_tags.answer(
            tag,
            structural_tags.up_to(
                one, most, structural_tags.sequence(*structural_tags.loose("; "))
            ),
        )

    def begin(self) -> Steps[None]:
        yield from self.objects()
