"""From an answer's text to reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.text import ParsedDelta, ReasoningParser, ToolCallParser
from headrace_server.parsers import Parsers
from headrace_server.protocol.base import check_size
from headrace_server.protocol.chat import ChatRequest


def calls_tools(body: ChatRequest, parsers: Parsers) -> bool:
    """Whether answers are searched for tool calls.

    Raises:
        RequestError: tools or tool_choice are malformed, or ask for what is not served.
    """
    _check_tools(body.tools or [])
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if body.tools else "none"
    if choice == "none":
        return False
    if choice == "auto":
        if not body.tools:
            raise RequestError("tool_choice = 'auto': needs tools", param="tool_choice")
        if parsers.tools is None:
            raise UnsupportedFeature(
                "tools: this server does not parse tool calls; start it with "
                "--enable-auto-tool-choice --tool-call-parser NAME, or send tool_choice 'none'",
                param="tools",
            )
        return True
    raise UnsupportedFeature(
        f"tool_choice = {str(choice)[:100]!r}: must be 'auto' or 'none'; forced calls are not "
        "served by this version",
        param="tool_choice",
    )


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    check_size("tools", list(tools))
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RequestError(
                f"tools[{index}]: must be {{'type': 'function', 'function': {{'name': ...}}}}",
                param="tools",
            )


class AnswerParser:
    """One choice's text on its way out. Reasoning is cut off first; calls are sought in the rest.

    Args:
        reasoning, tools: parsers of this answer, or None.
        keep_reasoning: False drops reasoning.
        one_call: only the first call is kept.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        *,
        keep_reasoning: bool = True,
        one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keep_reasoning = keep_reasoning
        self._one_call = one_call
        self.called = False
        """A tool was called."""

    def feed(self, text: str, *, last: bool) -> ParsedDelta:
        """Take the next piece; with ``last``, also what was held back."""
        if self._reasoning is None:
            return self._seek_calls(text, "", last=last)
        delta = self._reasoning.feed(text)
        if last:
            rest = self._reasoning.finish()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
        return self._seek_calls(delta.content, delta.reasoning, last=last)

    def _seek_calls(self, content: str, reasoning: str, *, last: bool) -> ParsedDelta:
        reasoning = reasoning if self._keep_reasoning else ""
        if self._tools is None:
            return ParsedDelta(content, reasoning)
        delta = self._tools.feed(content)
        if last:
            rest = self._tools.finish()
            delta.content += rest.content
            delta.tool_calls += rest.tool_calls
        self.called = self.called or bool(delta.tool_calls)
        if self._one_call:
            delta.tool_calls = [call for call in delta.tool_calls if call.index == 0]
        return ParsedDelta(delta.content, reasoning, delta.tool_calls)


def call_id() -> str:
    """Id of a tool call on the wire."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"
