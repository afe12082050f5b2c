"""Hermes and Qwen format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class HermesToolParser(ObjectsParser):
    """Nous Hermes 2 Pro and later, Qwen2.5 and Qwen3, QwQ, Granite 4."""

    needs_special_tokens = True
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)
    delimiters = ("<tool_call>\n", "\n</tool_call>")
    format = ObjectFormat(close=closes, arguments=("arguments",), arguments_optional=True)
