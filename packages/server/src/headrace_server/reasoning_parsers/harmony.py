"""gpt-oss: messages of the channel ``analysis`` are reasoning, others are the answer.

Messages to tools stay as they were written, marks and all: the tool-call parser ``openai`` reads
them. See :mod:`headrace_server.tool_parsers.harmony` for the form of messages.
"""

from __future__ import annotations

import contextlib

from headrace_server.reasoning_parsers.machine import ReasoningMachine
from headrace_server.source import Broken, Steps
from headrace_server.tool_parsers.harmony import (
    ENDS,
    MAX_HEADER,
    MESSAGE,
    OPENS,
    START,
    read_header,
)


class GptOssReasoningParser(ReasoningMachine):
    """See the module."""

    needs_special_tokens = True
    start_marker = "<|channel|>analysis<|message|>"
    end_marker = "<|channel|>final<|message|>"
    calls_before_end = True
    thought_end = "<|end|>"

    def read(self) -> Steps[None]:
        mark = ""
        while True:
            mark = mark or (yield from self.source.until(OPENS, self.tell))
            if not mark:
                return
            mark = yield from self._message(mark)

    def _message(self, mark: str) -> Steps[str]:
        """Read a message behind its opening mark. Returns the mark that opens the next."""
        source = self.source
        source.held = [mark]
        text = found = ""
        with contextlib.suppress(Broken):
            text, found = yield from source.before((MESSAGE, START, *ENDS), limit=MAX_HEADER)
        held, source.held = "".join(source.held), None
        if found != MESSAGE:  # no message, so it is text
            self.tell(held.removesuffix(START) if found == START else held)
            return found if found == START else ""
        header = read_header(mark, text)
        if header.is_reasoning:
            end = yield from source.until(OPENS + ENDS, self.think)
        else:
            if header.recipient:
                self.tell(held)
            end = yield from source.until(OPENS + ENDS, self.tell)
            if header.recipient and end in ENDS:
                self.tell(end)
        return end if end in OPENS else ""
