"""Llama 3.2, ToolACE and others: a list of calls, the first thing in the answer."""

from __future__ import annotations

from headrace_server.tool_parsers.python_calls import PythonCallsParser


class PythonicToolParser(PythonCallsParser):
    """Llama 3.2, ToolACE and others: a list of calls, the first thing in the answer."""
