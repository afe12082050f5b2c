"""The text of a gpt-oss answer, tags included -> reasoning, text and calls by channel.

The answer begins inside a message's head (the prompt ends with ``<|start|>assistant``). A head ends
with ``<|message|>``; a body with ``<|end|>``, ``<|call|>`` or ``<|return|>``, or where the next head
begins. Text is read once; at most a beginning of a tag, or a head, is held back.
"""

from __future__ import annotations

from headrace_core.text import ParsedDelta, ToolCallParser
from headrace_server.chat.segments import CallPiece, Content, MessageBreak, Reasoning, Segment
from headrace_server.harmony.messages import ANALYSIS, FUNCTIONS
from headrace_server.harmony.prompt import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
)
from headrace_server.parsing.answer_parser import LastCall

_MAX_HEAD = 1024
"""Characters; what is longer is no head but text."""
_ENDS = (END, CALL, RETURN, START)
_LONGEST = max(map(len, (*_ENDS, MESSAGE)))
_FIRST_HEADS = (CHANNEL, MESSAGE, START, " to=", "to=", "assistant")
"""Beginnings of answers that have tags."""


class HarmonyReader:
    """A :class:`~headrace_server.chat.segments.AnswerReader` of this format.

    Args:
        keep_reasoning: False drops the analysis channel.
        one_call: only the first call is kept.
        only_calls: a constraint forces the answer to be calls: any other text is dropped.
        forced: reads the calls of an answer that a constraint forces to have another form: such
            calls are its text, and the model's own messages to tools cannot be there.
    """

    def __init__(
        self,
        *,
        keep_reasoning: bool = True,
        one_call: bool = False,
        only_calls: bool = False,
        forced: ToolCallParser | None = None,
    ) -> None:
        self._keep_reasoning, self._one_call = keep_reasoning, one_call
        self._only_calls, self._forced = only_calls, forced
        self._last_call = LastCall()
        self.called = False
        """A tool was called."""
        self.ends_in_call = False
        """The output was cut within a call."""
        self.thoughts: list[str] = []
        """The analysis channel in pieces, kept or not."""
        self._in_head = self._at_start = True
        self._held = ""
        self._channel = ""
        self._recipient: str | None = None
        self._num_calls = 0
        self._argued = False
        """The call that is being read has arguments."""
        self._tagged = False
        """A head was seen: the text has tags."""

    def call_id(self, index: int, name: str) -> str | None:
        """The format has no ids of calls."""
        return None

    @property
    def call_is_open(self) -> bool:
        """The last call's arguments are not complete."""
        return self._last_call.open

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        """See :meth:`headrace_server.chat.segments.AnswerReader.feed`."""
        self._held += text
        found: list[Segment] = []
        while self._held and (self._head(found) if self._in_head else self._body(found)):
            pass
        if last:
            in_head = self._in_head and self._num_calls > 0 and bool(self._held.strip())
            self._end(found, cut=cut)
            if self._forced is not None:
                self._add_forced(self._forced.finish(), found)
            self.ends_in_call = cut and (in_head or self.call_is_open)
        return found

    def _head(self, found: list[Segment]) -> bool:
        """Read a head; False: its end has not come."""
        if self._at_start and not _may_be_a_head(self._held):
            self._in_head, self._channel, self._recipient = False, "final", None
            return True
        end = self._held.find(MESSAGE, 0, _MAX_HEAD)
        if end < 0:
            if len(self._held) < _MAX_HEAD:
                return False
            # No tag for so long: the engine dropped them, or the model lost the format.
            self._in_head, self._channel, self._recipient = False, "final", None
            return True
        head, self._held = self._held[:end], self._held[end + len(MESSAGE) :]
        self._in_head, self._tagged = False, True
        self._channel, self._recipient = _parse_head(head)
        if self._recipient is not None:
            name, self._argued = self._recipient.removeprefix(FUNCTIONS + "."), False
            self._add_call(CallPiece(self._num_calls, name, ""), found)
            self._num_calls += 1
        return True

    def _body(self, found: list[Segment]) -> bool:
        """Read a body, or a piece of it; False: all that is certain was read."""
        ends = [(i, tag) for tag in _ENDS if (i := self._held.find(tag)) >= 0]
        if ends:
            position, tag = min(ends)
            self._say(self._held[:position], found)
            self._end_call(found)
            self._held = self._held[position + len(tag) :]
            self._in_head, self._at_start = True, False
            found.append(MessageBreak())
            return True
        keep = _beginning_of_a_tag(self._held)
        certain = len(self._held) - keep
        self._say(self._held[:certain], found)
        self._held = self._held[certain:]
        return False

    def _say(self, text: str, found: list[Segment]) -> None:
        if not text:
            return
        if self._recipient is not None:
            self._argued = True
            self._add_call(CallPiece(self._num_calls - 1, None, text), found)
        elif self._channel == ANALYSIS:
            self.thoughts.append(text)
            if self._keep_reasoning:
                found.append(Reasoning(text))
        elif self._forced is not None:
            self._add_forced(self._forced.feed(text), found)
        elif not self._only_calls:
            found.append(Content(text))

    def _end_call(self, found: list[Segment]) -> None:
        """A function that is given nothing is given no arguments: clients parse JSON."""
        is_function = (self._recipient or "").startswith(FUNCTIONS + ".")
        if is_function and not self._argued:
            self._add_call(CallPiece(self._num_calls - 1, None, "{}"), found)

    def _add_call(self, piece: CallPiece, found: list[Segment]) -> None:
        self.called = True
        self._last_call.add(piece.index, piece.arguments)
        if piece.index == 0 or not self._one_call:
            found.append(piece)

    def _add_forced(self, parsed: ParsedDelta, found: list[Segment]) -> None:
        if parsed.content and not self._only_calls:
            found.append(Content(parsed.content))
        for call in parsed.tool_calls:
            self._add_call(CallPiece(call.index, call.name, call.arguments), found)

    def _end(self, found: list[Segment], *, cut: bool) -> None:
        """Say the held text, but for a head that never ended. A call that was cut before its
        arguments has none."""
        held, self._held = self._held, ""
        if not self._in_head:
            self._say(held, found)
            if not cut:
                self._end_call(found)
        elif not self._tagged and CHANNEL not in held:
            self._channel, self._recipient = "final", None
            self._say(held, found)


def parse_chat(text: str) -> tuple[str | None, str | None]:
    """Reasoning and final text of a whole answer; None for what is empty. Calls are left out."""
    segments = HarmonyReader().feed(text, last=True)
    thought = "".join(s.text for s in segments if isinstance(s, Reasoning))
    said = "".join(s.text for s in segments if isinstance(s, Content))
    return thought or None, said or None


def _may_be_a_head(text: str) -> bool:
    """True if an answer's beginning may be a head's, as far as it has come."""
    return any(text.startswith(head) or head.startswith(text) for head in _FIRST_HEADS)


def _parse_head(head: str) -> tuple[str, str | None]:
    """Channel and recipient of ``assistant to=X<|channel|>C to=X <|constrain|>json``."""
    for tag in (START, CONSTRAIN):
        head = head.replace(tag, " ")
    role, _, rest = head.partition(CHANNEL)
    words = rest.split()
    channel = words[0] if words and not words[0].startswith("to=") else ""
    for word in (*words, *role.split()):
        if word.startswith("to=") and word != "to=assistant":
            return channel, word.removeprefix("to=") or None
    return channel, None


def _beginning_of_a_tag(text: str) -> int:
    """Number of characters at the end that may begin a tag."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    if start < 0:
        return 0
    end = text[start:]
    return len(end) if any(tag.startswith(end) for tag in _ENDS) else 0
