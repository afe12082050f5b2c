"""MiniMax M2: the opening tag is in the prompt."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class MiniMaxM2ReasoningParser(TaggedReasoningParser):
    """MiniMax M2: the opening tag is in the prompt."""

    format = ReasoningFormat(begun=True)
