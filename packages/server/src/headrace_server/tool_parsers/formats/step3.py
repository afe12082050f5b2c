"""Step 3: calls between tags, written as MiniMax M2's with a prefix."""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParametersParser, invoke_tags


class Step3ToolParser(ParametersParser):
    """Step 3: calls between tags, written as MiniMax M2's with a prefix."""

    format = invoke_tags(
        "steptml:",
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="'),
        call_end=("</steptml:invoke>", "<｜tool_call_end｜>"),
        bare=True,
    )
