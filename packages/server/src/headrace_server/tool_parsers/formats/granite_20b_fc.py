"""granite-20b-functioncalling: ``<function_call>`` and an object, for each call."""

from __future__ import annotations

from headrace_server.tool_parsers.objects import ObjectFormat, ObjectsParser


class Granite20bToolParser(ObjectsParser):
    """granite-20b-functioncalling: ``<function_call>`` and an object, for each call."""

    needs_special_tokens = True
    opens = ("<function_call>",)
    delimiters = ("<function_call> ", "")
    format = ObjectFormat(arguments_optional=True)
