"""Jamba 1.5: ``<tool_calls>`` list of objects ``</tool_calls>``."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class JambaToolParser(ObjectsParser):
    """Jamba 1.5: ``<tool_calls>`` list of objects ``</tool_calls>``."""

    needs_special_tokens = True
    opens = ("<tool_calls>",)
    closes = ("</tool_calls>",)
    delimiters = ("<tool_calls>[\n", "\n]</tool_calls>")
    between = ",\n"
    format = ObjectFormat(array=True, close=closes)
