"""MiniMax M1: ``<tool_calls>``, an object a line, ``</tool_calls>``, not in the reasoning."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class MiniMaxToolParser(ObjectsParser):
    """MiniMax M1: ``<tool_calls>``, an object a line, ``</tool_calls>``, not in the reasoning."""

    needs_special_tokens = True
    ignored = ("<think>", "</think>")
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    delimiters = ("<tool_calls>\n", "\n</tool_calls>")
    between = "\n"
    format = ObjectFormat(separator="", close=closes, arguments_optional=True)
