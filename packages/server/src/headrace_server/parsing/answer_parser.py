"""From an answer's text to reasoning, content and tool calls, piece by piece, by the operator's parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from headrace_core.output import CompletionOutput
from headrace_core.text import ParsedDelta, ReasoningParser, ToolCallDelta, ToolCallParser
from headrace_server.chat.segments import CallPiece, Content, Reasoning, Segment
from headrace_server.parsing.token_filter import TokenFilter
from headrace_server.tool_parsers.json_values import JsonScanner

_EDGES = re.compile(r"(?<=[>\])}\n])|(?=[<\[{])")
"""Where calls begin and end."""


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


class KeptThought:
    """The beginning of a content, up to the tag that ends its reasoning.

    Args:
        end: the tag.
    """

    def __init__(self, end: str) -> None:
        self._end = end
        self._held = ""
        """Text that may be the tag's beginning."""
        self._ended = False

    def split(self, text: str, *, last: bool) -> tuple[str, str]:
        """The next piece -> (what of it is reasoning, tag included; what follows).

        Args:
            last: no more text comes: what was held back is reasoning.
        """
        if self._ended:
            return "", text
        text, self._held = self._held + text, ""
        thought, tag, rest = text.partition(self._end)
        self._ended = bool(tag)
        if tag or last:
            return thought + tag, rest
        lengths = range(min(len(text), len(self._end) - 1), 0, -1)
        held = next((n for n in lengths if self._end.startswith(text[-n:])), 0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], ""


class AnswerParser:
    """An :class:`~headrace_server.chat.segments.AnswerReader` over the operator's parsers.

    Reasoning is cut off first; calls are sought in the rest.

    Args:
        reasoning, tools: parsers of this answer, or None.
        keep_reasoning: False drops reasoning.
        one_call: only the first call is kept.
        only_calls: a constraint forces the answer to be calls: any other text is a part of a call
            that was cut, and is dropped. Reasoning that stays in the content is not.
        in_order: give texts and calls in the model's order. A parser does not say whether text
            came before a call or after it, so texts are fed to it in parts that hold one or the
            other, however the engine cut them.
        hidden: texts to take out of reasoning and content after parsing, as
            :func:`~headrace_server.parsing.token_filter.by_first` orders them.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolCallParser | None,
        *,
        keep_reasoning: bool = True,
        one_call: bool = False,
        only_calls: bool = False,
        in_order: bool = False,
        hidden: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._keep_reasoning = keep_reasoning
        self._one_call = one_call
        self._splits = in_order and tools is not None
        self._only_calls = only_calls
        self._thought: KeptThought | None = None
        if only_calls and reasoning is not None and reasoning.keeps_in_content:
            prompt = reasoning.context.prompt_end.rstrip()
            if not prompt.endswith(reasoning.end_marker):  # else the template has ended it
                self._thought = KeptThought(reasoning.end_marker)
        self._filters = (TokenFilter(hidden), TokenFilter(hidden)) if hidden else None
        self._is_plain = reasoning is None and tools is None and not hidden
        """True if all text is content."""
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

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        """See :meth:`headrace_server.chat.segments.AnswerReader.feed`."""
        if self._is_plain:
            return [Content(text)] if text else []
        if not self._splits:
            return self._segments(text, last=last, cut=cut)
        *parts, end = _EDGES.split(text)
        segments: list[Segment] = []
        for part in parts:
            segments += self._segments(part, last=False)
        return segments + self._segments(end, last=last, cut=cut)

    def call_id(self, index: int, name: str) -> str | None:
        """See :meth:`headrace_server.chat.segments.AnswerReader.call_id`."""
        return self._tools.call_id(index, name) if self._tools is not None else None

    def _segments(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        called = self.called
        delta = self._parse(text, last=last, cut=cut)
        said: list[Segment] = [Content(delta.content)] if delta.content else []
        if delta.tool_calls:
            calls = [CallPiece(call.index, call.name, call.arguments) for call in delta.tool_calls]
            # Once a call has begun, what comes along with a piece of it is what follows it.
            said = [*calls, *said] if called else [*said, *calls]
        return [Reasoning(delta.reasoning), *said] if delta.reasoning else said

    def _parse(self, text: str, *, last: bool, cut: bool) -> ParsedDelta:
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

    def _seek_calls(
        self, tools: ToolCallParser, delta: ParsedDelta, *, last: bool, cut: bool
    ) -> None:
        thought = ""
        if self._thought is not None:
            thought, delta.content = self._thought.split(delta.content, last=last)
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
            found.content = thought
        if self._one_call:
            found.tool_calls = [call for call in found.tool_calls if call.index == 0]
        delta.content, delta.tool_calls = found.content, found.tool_calls

    def _note(self, pieces: Sequence[ToolCallDelta]) -> None:
        self.called = self.called or bool(pieces)
        for piece in pieces:
            self._last_call.add(piece.index, piece.arguments)


def _filtered(texts: TokenFilter, piece: str, *, last: bool) -> str:
    shown = texts.feed(piece)
    return shown + texts.finish() if last else shown
