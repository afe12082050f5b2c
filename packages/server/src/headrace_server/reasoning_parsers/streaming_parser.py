"""Base of all reasoning formats: the run over the text, and what it gives away."""

from __future__ import annotations

from abc import abstractmethod

from headrace_core.text import AnswerContext, ParsedDelta, ReasoningParser
from headrace_server.parsing.text_scanner import Steps, TextScanner, chunks


class StreamingReasoningParser(ReasoningParser):
    """A format written as steps over a :class:`TextScanner`, so that cuts do not matter."""

    def __init__(self, context: AnswerContext | None = None) -> None:
        super().__init__(context)
        self.source = TextScanner()
        self._run: Steps[None] | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the whole answer."""

    def feed(self, text: str) -> ParsedDelta:
        for chunk in chunks(text):
            self.source.add(chunk)
            self._resume()
        return self._flush()

    def finish(self) -> ParsedDelta:
        self.source.end()
        self._resume()
        return self._flush()

    def emit_content(self, text: str) -> None:
        """Text is answer."""
        self._content.append(text)

    def emit_reasoning(self, text: str) -> None:
        """Text is reasoning."""
        self._reasoning.append(text)

    def _resume(self) -> None:
        if self._run is None:
            self._run = self.read()
        next(self._run, None)

    def _flush(self) -> ParsedDelta:
        delta = ParsedDelta("".join(self._content), "".join(self._reasoning))
        self._content, self._reasoning = [], []
        return delta
