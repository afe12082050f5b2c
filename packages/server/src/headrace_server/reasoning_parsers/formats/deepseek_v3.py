"""DeepSeek V3.1: thinks if asked to."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class DeepSeekV3ReasoningParser(TaggedReasoningParser):
    """DeepSeek V3.1: thinks if asked to."""

    format = ReasoningFormat(begun=True, switches=("thinking", "enable_thinking"), thinks=False)
