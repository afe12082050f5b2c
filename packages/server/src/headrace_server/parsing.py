"""From an answer's text to reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from headrace_core.text import ParsedDelta, ReasoningParser, ToolCallParser
from headrace_server.special_tokens import TokenFilter


class AnswerParser:
    """One choice's text on its way out. Reasoning is cut off first; calls are sought in the rest.

    Args:
        reasoning, tools: parsers of this answer, or None.
        keep_reasoning: False drops reasoning.
        one_call: only the first call is kept.
        hidden: texts to take out of reasoning and content after parsing, as
            :func:`~headrace_server.special_tokens.by_first` orders them.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        *,
        keep_reasoning: bool = True,
        one_call: bool = False,
        hidden: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keep_reasoning = keep_reasoning
        self._one_call = one_call
        self._filters = (TokenFilter(hidden), TokenFilter(hidden)) if hidden else None
        self.called = False
        """A tool was called."""
        self.thoughts: list[str] = []
        """The reasoning in pieces, kept or not."""

    def feed(self, text: str, *, last: bool) -> ParsedDelta:
        """Take the next piece; with ``last``, also what was held back."""
        delta = ParsedDelta(text)
        if self._reasoning is not None:
            delta = self._reasoning.feed(text)
            if last:
                rest = self._reasoning.finish()
                delta.content += rest.content
                delta.reasoning += rest.reasoning
        if delta.reasoning:
            self.thoughts.append(delta.reasoning)
        if not self._keep_reasoning:
            delta.reasoning = ""
        if self._tools is not None:
            self._seek_calls(self._tools, delta, last=last)
        if self._filters is not None:
            delta.content = _filtered(self._filters[0], delta.content, last=last)
            delta.reasoning = _filtered(self._filters[1], delta.reasoning, last=last)
        return delta

    def own_id(self, index: int, name: str) -> str | None:
        """The id that the model's format gives to a call; None: any will do."""
        return self._tools.call_id(index, name) if self._tools is not None else None

    def call_id(self, index: int, name: str) -> str:
        """The id of a call on the wire: the format's own, or a random one."""
        own = self.own_id(index, name)
        return own if own is not None else call_id()

    def _seek_calls(self, tools: ToolCallParser, delta: ParsedDelta, *, last: bool) -> None:
        found = tools.feed(delta.content)
        if last:
            rest = tools.finish()
            found.content += rest.content
            found.tool_calls += rest.tool_calls
        self.called = self.called or bool(found.tool_calls)
        if self._one_call:
            found.tool_calls = [call for call in found.tool_calls if call.index == 0]
        delta.content, delta.tool_calls = found.content, found.tool_calls


def call_id() -> str:
    """A random id of a tool call on the wire."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _filtered(texts: TokenFilter, piece: str, *, last: bool) -> str:
    shown = texts.feed(piece)
    return shown + texts.finish() if last else shown
