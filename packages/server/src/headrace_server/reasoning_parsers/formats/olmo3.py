"""Olmo 3 Think: the opening tag is in the prompt; both are ordinary text."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class Olmo3ReasoningParser(TaggedReasoningParser):
    """Olmo 3 Think: the opening tag is in the prompt; both are ordinary text."""

    format = ReasoningFormat(begun=True)
