"""ERNIE 4.5: the opening tag is in the prompt; the answer may stand between tags."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class Ernie45ReasoningParser(TaggedReasoningParser):
    """ERNIE 4.5: the opening tag is in the prompt; the answer may stand between tags."""

    needs_special_tokens = True
    format = ReasoningFormat(begun=True, wrap=("<response>", "</response>"), newlines=True)
