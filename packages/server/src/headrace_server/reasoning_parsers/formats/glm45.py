"""GLM 4.5 to 4.7: the opening tag is in the text or in the prompt."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import TaggedReasoningParser


class Glm45ReasoningParser(TaggedReasoningParser):
    """GLM 4.5 to 4.7: the opening tag is in the text or in the prompt."""

    needs_special_tokens = True
