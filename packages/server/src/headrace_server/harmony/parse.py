"""The text of a gpt-oss answer, marks included -> reasoning, text and calls by channel.

The answer begins inside a message's head (the prompt ends with ``<|start|>assistant``). A head ends
with ``<|message|>``; a body with ``<|end|>``, ``<|call|>`` or ``<|return|>``, or where the next head
begins. Text is read once; at most a beginning of a mark, or a head, is held back.
"""

from __future__ import annotations

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
from headrace_server.segments import Break, CallPiece, Content, Reasoning, Segment

_MAX_HEAD = 1024
"""Characters; what is longer is no head but text."""
_ENDS = (END, CALL, RETURN, START)
_LONGEST = max(map(len, (*_ENDS, MESSAGE)))


class HarmonyReader:
    """A :class:`~headrace_server.conversation.Reader` of this format.

    Args:
        keep_reasoning: False drops the analysis channel.
    """

    def __init__(self, *, keep_reasoning: bool = True) -> None:
        self._keep_reasoning = keep_reasoning
        self._in_head = True
        self._held = ""
        self._channel = ""
        self._recipient: str | None = None
        self._num_calls = 0
        self._marked = False
        """A head was seen: the text has marks."""

    def call_id(self, index: int, name: str) -> str | None:
        """The format has no ids of calls."""
        return None

    def feed(self, text: str, *, last: bool) -> list[Segment]:
        """Take the next piece; with ``last``, also what was held back."""
        self._held += text
        found: list[Segment] = []
        while self._held and (self._head(found) if self._in_head else self._body(found)):
            pass
        if last:
            self._end(found)
        return found

    def _head(self, found: list[Segment]) -> bool:
        """Read a head; False: its end has not come."""
        end = self._held.find(MESSAGE, 0, _MAX_HEAD)
        if end < 0:
            if len(self._held) < _MAX_HEAD:
                return False
            # No mark for so long: the engine dropped them, or the model lost the format.
            self._in_head, self._channel, self._recipient = False, "final", None
            return True
        head, self._held = self._held[:end], self._held[end + len(MESSAGE) :]
        self._in_head, self._marked = False, True
        self._channel, self._recipient = _parse_head(head)
        if self._recipient is not None:
            name = self._recipient.removeprefix(FUNCTIONS + ".")
            found.append(CallPiece(self._num_calls, name, ""))
            self._num_calls += 1
        return True

    def _body(self, found: list[Segment]) -> bool:
        """Read a body, or a piece of it; False: all that is certain was read."""
        ends = [(i, mark) for mark in _ENDS if (i := self._held.find(mark)) >= 0]
        if ends:
            position, mark = min(ends)
            self._say(self._held[:position], found)
            self._held = self._held[position + len(mark) :]
            self._in_head = True
            found.append(Break())
            return True
        keep = _beginning_of_a_mark(self._held)
        certain = len(self._held) - keep
        self._say(self._held[:certain], found)
        self._held = self._held[certain:]
        return False

    def _say(self, text: str, found: list[Segment]) -> None:
        if not text:
            return
        if self._recipient is not None:
            found.append(CallPiece(self._num_calls - 1, None, text))
        elif self._channel != ANALYSIS:
            found.append(Content(text))
        elif self._keep_reasoning:
            found.append(Reasoning(text))

    def _end(self, found: list[Segment]) -> None:
        """What is held is said, but for a head that never ended."""
        held, self._held = self._held, ""
        if not self._in_head:
            self._say(held, found)
        elif not self._marked and CHANNEL not in held:
            self._channel, self._recipient = "final", None
            self._say(held, found)


def parse_chat(text: str) -> tuple[str | None, str | None]:
    """Reasoning and final text of a whole answer; None for what is empty. Calls are left out."""
    segments = HarmonyReader().feed(text, last=True)
    thought = "".join(s.text for s in segments if isinstance(s, Reasoning))
    said = "".join(s.text for s in segments if isinstance(s, Content))
    return thought or None, said or None


def _parse_head(head: str) -> tuple[str, str | None]:
    """Channel and recipient of ``assistant to=X<|channel|>C to=X <|constrain|>json``."""
    for mark in (START, CONSTRAIN):
        head = head.replace(mark, " ")
    role, _, rest = head.partition(CHANNEL)
    words = rest.split()
    channel = words[0] if words and not words[0].startswith("to=") else ""
    for word in (*words, *role.split()):
        if word.startswith("to=") and word != "to=assistant":
            return channel, word.removeprefix("to=") or None
    return channel, None


def _beginning_of_a_mark(text: str) -> int:
    """How many characters at the end may begin a mark."""
    start = text.rfind("<", max(0, len(text) - _LONGEST))
    if start < 0:
        return 0
    end = text[start:]
    return len(end) if any(mark.startswith(end) for mark in _ENDS) else 0
