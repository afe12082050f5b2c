"""MiniMax M2: nothing is split; the tag that the prompt held is put before the answer."""

from __future__ import annotations

from headrace_server.parsing.text_scanner import Steps
from headrace_server.reasoning_parsers.streaming_parser import StreamingReasoningParser


class MiniMaxM2AppendThinkReasoningParser(StreamingReasoningParser):
    """MiniMax M2: nothing is split; the tag that the prompt held is put before the answer."""

    start_marker = "<think>"
    end_marker = "</think>"
    keeps_in_content = True

    def read(self) -> Steps[None]:
        skipped = self.context.prompt_end.rstrip().endswith(self.end_marker)
        if (yield from self.source.peek()) and not skipped:
            self.emit_content(self.start_marker)
        yield from self.source.until((), self.emit_content)
