"""Olmo 3: ``<function_calls>``, a call a line, ``</function_calls>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.python_calls import PythonCallsParser, forced_call, strict_call


class Olmo3ToolParser(PythonCallsParser):
    """Olmo 3: ``<function_calls>``, a call a line, ``</function_calls>``."""

    needs_special_tokens = False
    opens = ("<function_calls>",)
    closes = ("</function_calls>",)

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        found = structural_tags.calls([strict_call(*tool) for tool in tools.items()], "\n")
        inside = structural_tags.sequence(structural_tags.SPACE, found, structural_tags.SPACE)
        return structural_tags.free_text(
            cls.opens, [structural_tags.tag(cls.opens[0], inside, cls.closes[0])]
        )

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        one = structural_tags.either(*(forced_call(*tool) for tool in tools.items()))
        inside = structural_tags.sequence(
            structural_tags.SPACE,
            structural_tags.up_to(
                one, most, structural_tags.sequence(*structural_tags.loose("\n"))
            ),
            structural_tags.SPACE,
        )
        return structural_tags.answer(structural_tags.tag(cls.opens[0], inside, cls.closes[0]))

    def begin(self) -> Steps[None]:
        yield from ()

    def calls(self, tag: str) -> Steps[None]:
        source = self.source
        yield from source.space()
        while True:
            yield from self.python_call()
            yield from source.space()
            if (yield from source.peek()) == "<":
                yield from source.expect(*self.closes)
                return
            self.next_call()
