"""Qwen3 format: ``<think>reasoning</think>answer``; text without the opening tag is all answer.

Nothing is trimmed: reasoning and answer together are the text without its two tags. Reasoning that
is cut off before its closing tag stays reasoning, since it was streamed as such.
"""

from __future__ import annotations

from headrace_core.text import AnswerContext, ParsedDelta, ReasoningParser

OPEN, CLOSE = "<think>", "</think>"
_MAX_SPACE = 64
"""More white space than this at the beginning is an answer's own."""


class Qwen3ReasoningParser(ReasoningParser):
    """See the module."""

    end_marker = CLOSE

    def __init__(self, context: AnswerContext | None = None) -> None:
        super().__init__(context)
        self._held = ""
        self._tag = OPEN
        """The tag that may come next; "" after the last."""

    def feed(self, text: str) -> ParsedDelta:
        if not self._tag:
            return ParsedDelta(content=text)
        text, self._held = self._held + text, ""
        if self._tag == OPEN:
            return self._begin(text)
        return self._reason(text)

    def finish(self) -> ParsedDelta:
        held, self._held = self._held, ""
        return ParsedDelta(reasoning=held) if self._tag == CLOSE else ParsedDelta(content=held)

    def _begin(self, text: str) -> ParsedDelta:
        """White space, then the opening tag, or there is no reasoning."""
        start = text.lstrip()
        if start.startswith(OPEN) and len(text) - len(start) <= _MAX_SPACE:
            self._tag = CLOSE
            return self._reason(start[len(OPEN) :])
        if OPEN.startswith(start) and len(text) - len(start) <= _MAX_SPACE:
            self._held = text
            return ParsedDelta()
        self._tag = ""
        return ParsedDelta(content=text)

    def _reason(self, text: str) -> ParsedDelta:
        reasoning, found, content = text.partition(CLOSE)
        if found:
            self._tag = ""
            return ParsedDelta(content=content, reasoning=reasoning)
        keep = _partial(text, CLOSE)
        self._held = text[len(text) - keep :]
        return ParsedDelta(reasoning=text[: len(text) - keep])


def _partial(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
