"""Step 3: the opening tag is in the prompt."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import ReasoningFormat, TaggedReasoningParser


class Step3ReasoningParser(TaggedReasoningParser):
    """Step 3: the opening tag is in the prompt."""

    needs_special_tokens = True
    format = ReasoningFormat(begun=True)
