"""Seed-OSS: tags of its own."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class SeedOssReasoningParser(TaggedReasoningParser):
    """Seed-OSS: tags of its own."""

    needs_special_tokens = True
    start_marker = "<seed:think>"
    end_marker = "</seed:think>"
    format = ReasoningFormat(starts=("<seed:think>",), ends=("</seed:think>",), begun=True)
