"""Where a constraint begins when a model reasons first."""

from __future__ import annotations

from headrace_core.errors import UnsupportedFeature
from headrace_core.text import ReasoningParser

PROMPT_TAIL = 4096
"""Last characters of a prompt in which reasoning may have ended already."""


def start_after(
    parser: type[ReasoningParser] | None, prompt_tail: str, *, begins_answer: bool
) -> str:
    """The text in the output from which on a constraint holds; "": from the first token on.

    Args:
        parser: of the model's reasoning; None: it does not reason, or its reasoning is constrained.
        prompt_tail: the last :data:`PROMPT_TAIL` characters of the prompt or more, special tokens
            included.
        begins_answer: the prompt ends where an answer begins; reasoning that it holds belongs to
            earlier answers, unless it ends with it.

    Raises:
        UnsupportedFeature: the reasoning format has no end marker.
    """
    if parser is None:
        return ""
    end = parser.end_marker
    if not end:
        raise UnsupportedFeature(
            f"structured_outputs: not with reasoning parser {parser.__name__}, whose "
            "format does not mark where the reasoning ends; the operator can set "
            "structured_outputs.enable_in_reasoning",
            param="structured_outputs",
        )
    tail = prompt_tail[-PROMPT_TAIL:]
    return "" if _ended(tail, parser.start_marker, end, begins_answer) else end


def _ended(tail: str, begin: str, end: str, begins_answer: bool) -> bool:
    """Whether the prompt holds the end of the reasoning that belongs to the coming output."""
    if tail.rstrip().endswith(end):
        return True
    if begins_answer:
        return False
    return tail.rfind(end) > (tail.rfind(begin) if begin else -1)
