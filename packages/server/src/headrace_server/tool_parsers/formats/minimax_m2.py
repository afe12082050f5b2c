"""MiniMax M2: ``<invoke name="F">`` and ``<parameter name="K">``."""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParametersParser, invoke_tags


class MiniMaxM2ToolParser(ParametersParser):
    """MiniMax M2: ``<invoke name="F">`` and ``<parameter name="K">``."""

    format = invoke_tags("", ("<minimax:tool_call>", "</minimax:tool_call>"), trim_newlines=True)
