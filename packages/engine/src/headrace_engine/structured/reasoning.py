"""The beginning of a constraint when a model reasons first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.errors import UnsupportedFeature
from headrace_core.text import ReasoningParser

PROMPT_TAIL = 4096
"""Last characters of a prompt in which reasoning may have ended already."""


class ConstraintStart(NamedTuple):
    """The place where a constraint begins to hold; fields of :class:`headrace_core.grammar.Constraint`."""

    start_after: str = ""
    may_begin_with: str = ""


def start_of(
    parser: type[ReasoningParser] | None,
    prompt_tail: str,
    *,
    begins_answer: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ConstraintStart:
    """The place in the output where a constraint begins to hold.

    Args:
        parser: of the model's reasoning; None: it does not reason, or its reasoning is constrained.
        prompt_tail: the last :data:`PROMPT_TAIL` characters of the prompt or more, special tokens
            included.
        begins_answer: the prompt ends where a chat's answer begins; reasoning that it holds belongs
            to earlier answers, unless it ends with it. False: nothing is expected but what the
            prompt itself has begun.
        chat_template_kwargs: variables of the chat's template, which may switch reasoning off.

    Raises:
        UnsupportedFeature: the reasoning format has no end marker.
    """
    if parser is None:
        return ConstraintStart()
    begin, end = parser.start_marker, parser.end_marker
    if not end:
        raise UnsupportedFeature(
            f"structured_outputs: not with reasoning parser {parser.__name__}, whose "
            "format does not mark where the reasoning ends; the operator can set "
            "structured_outputs.enable_in_reasoning",
            param="structured_outputs",
        )
    tail = prompt_tail[-PROMPT_TAIL:].rstrip()
    if tail.endswith(end):
        return ConstraintStart()
    if not begins_answer:
        is_open = bool(begin) and tail.rfind(begin) > tail.rfind(end)
        return ConstraintStart(end) if is_open else ConstraintStart()
    if begin and tail.endswith(begin):
        return ConstraintStart(end)
    if not parser.may_reason(chat_template_kwargs or {}):
        return ConstraintStart()
    if not begin or parser.begins_reasoning:
        return ConstraintStart(end)
    return ConstraintStart(end, begin)
