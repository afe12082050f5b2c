"""Holo 2: thinks unless asked not to."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class Holo2ReasoningParser(TaggedReasoningParser):
    """Holo 2: thinks unless asked not to."""

    format = ReasoningFormat(begun=True, switches=("thinking", "enable_thinking"))
