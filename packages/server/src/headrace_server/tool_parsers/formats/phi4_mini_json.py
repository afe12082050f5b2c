"""Phi-4-mini: ``functools[``, objects, ``]``."""

from __future__ import annotations

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers.objects import ObjectsParser


class Phi4MiniToolParser(ObjectsParser):
    """Phi-4-mini: ``functools[``, objects, ``]``."""

    opens = ("functools[",)
    delimiters = ("functools[", "]")
    between = ", "

    def calls(self, tag: str) -> Steps[None]:
        yield from self.object_list()
