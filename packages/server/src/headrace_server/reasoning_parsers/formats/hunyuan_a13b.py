"""Hunyuan A13B: the answer stands between tags, too."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class HunyuanReasoningParser(TaggedReasoningParser):
    """Hunyuan A13B: the answer stands between tags, too."""

    needs_special_tokens = True
    format = ReasoningFormat(wrap=("<answer>", "</answer>"), newlines=True)
