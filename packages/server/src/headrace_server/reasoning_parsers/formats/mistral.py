"""Magistral: ``[THINK]`` and ``[/THINK]``."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class MistralReasoningParser(TaggedReasoningParser):
    """Magistral: ``[THINK]`` and ``[/THINK]``."""

    needs_special_tokens = True
    start_marker = "[THINK]"
    end_marker = "[/THINK]"
    format = ReasoningFormat(starts=("[THINK]",), ends=("[/THINK]",))
