"""An answer in the gpt-oss format as chats read it: reasoning, content and calls of each piece."""

from __future__ import annotations

from headrace_core.text import ParsedDelta, ToolCallDelta
from headrace_server.harmony.parse import HarmonyReader
from headrace_server.parsing import call_id
from headrace_server.segments import CallPiece, Content, Reasoning


class HarmonyParser:
    """Does for this format what :class:`~headrace_server.parsing.AnswerParser` does for others."""

    def __init__(self, reader: HarmonyReader) -> None:
        self._reader = reader
        self.called = False
        """A tool was called."""

    @property
    def thoughts(self) -> list[str]:
        """The reasoning in pieces, kept or not."""
        return self._reader.thoughts

    @property
    def ends_in_call(self) -> bool:
        """The output was cut within a call."""
        return self._reader.ends_in_call

    def feed(self, text: str, *, last: bool, cut: bool = False) -> ParsedDelta:
        """Take the next piece; with ``last``, also what was held back.

        Args:
            cut: see :meth:`headrace_server.parsing.AnswerParser.feed`.
        """
        delta = ParsedDelta()
        for segment in self._reader.feed(text, last=last, cut=cut):
            match segment:
                case Reasoning():
                    delta.reasoning += segment.text
                case Content():
                    delta.content += segment.text
                case CallPiece():
                    call = ToolCallDelta(segment.index, segment.name, segment.arguments)
                    delta.tool_calls.append(call)
        self.called = self.called or bool(delta.tool_calls)
        return delta

    def call_id(self, index: int, name: str) -> str:
        """The id of a call on the wire. The format has none of its own."""
        return call_id()
