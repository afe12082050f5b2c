"""Granite 3.2: tags are sentences, so no constraint can begin behind them."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class GraniteReasoningParser(TaggedReasoningParser):
    """Granite 3.2: tags are sentences, so no constraint can begin behind them."""

    start_marker = end_marker = ""
    format = ReasoningFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    )
