"""gpt-oss: messages of the channel ``analysis`` are reasoning, others are the answer.

Messages to tools stay as they were written, tags and all: the tool-call parser ``openai`` reads
them. See :mod:`headrace_server.tool_parsers.harmony` for the form of messages.
"""

from __future__ import annotations

import contextlib

from headrace_server.parsing.text_scanner import ParseError, Steps
from headrace_server.reasoning_parsers.streaming_parser import StreamingReasoningParser
from headrace_server.tool_parsers.harmony import (
    ENDS,
    MAX_HEADER,
    MESSAGE,
    OPENS,
    START,
    read_header,
)


class GptOssReasoningParser(StreamingReasoningParser):
    """Reader of the analysis channel of gpt-oss messages."""

    needs_special_tokens = True
    start_marker = "<|channel|>analysis<|message|>"
    end_marker = "<|channel|>final<|message|>"
    calls_before_end = True
    thought_end = "<|end|>"

    def read(self) -> Steps[None]:
        tag = ""
        while True:
            tag = tag or (yield from self.source.until(OPENS, self.emit_content))
            if not tag:
                return
            tag = yield from self._message(tag)

    def _message(self, tag: str) -> Steps[str]:
        """Read a message behind its opening tag. Returns the tag that opens the next."""
        source = self.source
        source.held = [tag]
        text = found = ""
        with contextlib.suppress(ParseError):
            text, found = yield from source.before((MESSAGE, START, *ENDS), limit=MAX_HEADER)
        held, source.held = "".join(source.held), None
        if found != MESSAGE:  # no message, so it is text
            self.emit_content(held.removesuffix(START) if found == START else held)
            return found if found == START else ""
        header = read_header(tag, text)
        if header.is_reasoning:
            end = yield from source.until(OPENS + ENDS, self.emit_reasoning)
        else:
            if header.recipient:
                self.emit_content(held)
            end = yield from source.until(OPENS + ENDS, self.emit_content)
            if header.recipient and end in ENDS:
                self.emit_content(end)
        return end if end in OPENS else ""
