"""ERNIE 4.5 Thinking: ``<tool_call>`` object ``</tool_call>``."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class Ernie45ToolParser(ObjectsParser):
    """ERNIE 4.5 Thinking: ``<tool_call>`` object ``</tool_call>``."""

    needs_special_tokens = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    delimiters = ("<tool_call>\n", "\n</tool_call>")
    format = ObjectFormat(close=closes, arguments_optional=True)
