"""Granite 3: ``<|tool_call|>`` (3.0) or ``<tool_call>`` (3.1), then a list of objects."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class GraniteToolParser(ObjectsParser):
    """Granite 3: ``<|tool_call|>`` (3.0) or ``<tool_call>`` (3.1), then a list of objects."""

    needs_special_tokens = True
    opens = ("<|tool_call|>", "<tool_call>")
    delimiters = ("<|tool_call|>[", "]")
    between = ", "
    format = ObjectFormat(array=True)
