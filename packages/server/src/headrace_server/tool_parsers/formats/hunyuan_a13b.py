"""Hunyuan A13B: ``<tool_calls>`` list of objects ``</tool_calls>``, not in the reasoning."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class HunyuanToolParser(ObjectsParser):
    """Hunyuan A13B: ``<tool_calls>`` list of objects ``</tool_calls>``, not in the reasoning."""

    needs_special_tokens = True
    ignored = ("<think>", "</think>")
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    delimiters = ("<tool_calls>[", "]</tool_calls>")
    between = ", "
    format = ObjectFormat(array=True, close=closes)
