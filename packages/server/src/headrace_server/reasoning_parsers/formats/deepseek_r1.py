"""DeepSeek R1, QwQ, Kimi K2 Thinking: the opening tag may be missing.

Users name it ``deepseek_r1`` and ``kimi_k2``.
"""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class DeepSeekR1ReasoningParser(TaggedReasoningParser):
    """DeepSeek R1, QwQ, Kimi K2 Thinking: the opening tag may be missing."""

    format = ReasoningFormat(begun=True)
