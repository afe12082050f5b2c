"""Llama 4: a list of calls, perhaps between ``<|python_start|>`` and ``<|python_end|>``."""

from __future__ import annotations

from headrace_server.parsing.text_scanner import Steps
from headrace_server.tool_parsers.python_calls import PythonCallsParser


class Llama4PythonicToolParser(PythonCallsParser):
    """Llama 4: a list of calls, perhaps between ``<|python_start|>`` and ``<|python_end|>``."""

    opens = ("<|python_start|>",)
    closes = ("<|python_end|>",)

    def calls(self, tag: str) -> Steps[None]:
        yield from self.begin()
        yield from self.source.space()
        yield from self.source.expect(*self.closes)
