"""LongCat-Flash: ``<longcat_tool_call>`` object ``</longcat_tool_call>``."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class LongCatToolParser(ObjectsParser):
    """LongCat-Flash: ``<longcat_tool_call>`` object ``</longcat_tool_call>``."""

    needs_special_tokens = True
    opens = ("<longcat_tool_call>",)
    closes = ("</longcat_tool_call>",)
    delimiters = ("<longcat_tool_call>\n", "\n</longcat_tool_call>")
    format = ObjectFormat(close=closes, arguments=("arguments",), arguments_optional=True)
