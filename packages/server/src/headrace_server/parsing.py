"""From an answer's text to reasoning, content and tool calls, piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from headrace_core.output import CompletionOutput
from headrace_core.text import ParsedDelta, ReasoningParser, ToolCallDelta, ToolCallParser
from headrace_server.special_tokens import TokenFilter
from headrace_server.tool_parsers.json_text import JsonScanner


def is_cut(part: CompletionOutput) -> bool:
    """True if an output ended where its model did not end it: by its length, or by a text or token
    that the client named."""
    return part.finish_reason not in (None, "stop") or part.stop_reason is not None


class LastCall:
    """The arguments of an answer's last call so far."""

    def __init__(self) -> None:
        self._index = -1
        self._arguments: list[str] = []

    def add(self, index: int, arguments: str) -> None:
        """A piece of a call."""
        if index != self._index:
            self._index, self._arguments = index, []
        self._arguments.append(arguments)

    @property
    def open(self) -> bool:
        """True if there is a call and its arguments are not complete JSON."""
        scanner = JsonScanner()
        scanner.scan("".join(self._arguments))
        return self._index >= 0 and not scanner.finish()


class AnswerParser:
    """One choice's text on its way out. Reasoning is cut off first; calls are sought in the rest.

    Args:
        reasoning, tools: parsers of this answer, or None.
        keep_reasoning: False drops reasoning.
        one_call: only the first call is kept.
        only_calls: a constraint forces the answer to be calls: any other text is a part of a call
            that was cut, and is dropped.
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
        only_calls: bool = False,
        hidden: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keep_reasoning = keep_reasoning
        self._one_call = one_call
        self._only_calls = only_calls
        self._filters = (TokenFilter(hidden), TokenFilter(hidden)) if hidden else None
        self._last_call = LastCall()
        self.called = False
        """A tool was called."""
        self.ends_in_call = False
        """The output was cut within a call, or within what may have become one behind another."""
        self.thoughts: list[str] = []
        """The reasoning in pieces, kept or not."""

    @property
    def call_is_open(self) -> bool:
        """The last call's arguments are not complete."""
        return self._last_call.open

    def feed(self, text: str, *, last: bool, cut: bool = False) -> ParsedDelta:
        """Take the next piece; with ``last``, also what was held back.

        Args:
            cut: the output ends here because it was cut (:func:`is_cut`). Behind a call, what was
                held back is then the beginning of another or of a tag, and is dropped.
        """
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
            self._seek_calls(self._tools, delta, last=last, cut=cut)
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

    def _seek_calls(
        self, tools: ToolCallParser, delta: ParsedDelta, *, last: bool, cut: bool
    ) -> None:
        found = tools.feed(delta.content)
        self._note(found.tool_calls)
        if last:
            rest = tools.finish()
            if cut and self.called:
                self.ends_in_call = bool(rest.content.strip())
                rest.content = ""
            found.content += rest.content
            found.tool_calls += rest.tool_calls
            self._note(rest.tool_calls)
            self.ends_in_call = cut and (self.ends_in_call or self.call_is_open)
        if self._only_calls:
            found.content = ""
        if self._one_call:
            found.tool_calls = [call for call in found.tool_calls if call.index == 0]
        delta.content, delta.tool_calls = found.content, found.tool_calls

    def _note(self, pieces: Sequence[ToolCallDelta]) -> None:
        self.called = self.called or bool(pieces)
        for piece in pieces:
            self._last_call.add(piece.index, piece.arguments)


def call_id() -> str:
    """A random id of a tool call on the wire."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _filtered(texts: TokenFilter, piece: str, *, last: bool) -> str:
    shown = texts.feed(piece)
    return shown + texts.finish() if last else shown
