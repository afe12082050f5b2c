"""Qwen3 format: ``<think>reasoning</think>answer``; text without the opening tag is all answer."""

from __future__ import annotations

from headrace_server.reasoning_parsers.tagged import TaggedReasoningParser


class Qwen3ReasoningParser(TaggedReasoningParser):
    """Qwen3: the opening tag is in the text or, in models that only think, in the prompt."""
