"""InternLM 2.5: ``<|action_start|><|plugin|>`` object ``<|action_end|>``."""

from __future__ import annotations

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class InternLmToolParser(ObjectsParser):
    """InternLM 2.5: ``<|action_start|><|plugin|>`` object ``<|action_end|>``."""

    needs_special_tokens = True
    opens = ("<|action_start|>",)
    closes = ("<|action_end|>",)
    delimiters = ("<|action_start|><|plugin|>\n", "<|action_end|>\n")
    format = ObjectFormat(close=closes, arguments=("parameters", "arguments"))

    def calls(self, tag: str) -> Steps[None]:
        yield from self.source.space()
        yield from self.source.expect("<|plugin|>")
        yield from self.objects()
