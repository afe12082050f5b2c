"""Qwen3 format: ``<think>reasoning</think>answer``; text without the opening tag is all answer."""

from __future__ import annotations

from headrace_server.reasoning_parsers.marked import MarkedReasoningParser


class Qwen3ReasoningParser(MarkedReasoningParser):
    """Qwen3: the opening mark is in the text or, in models that only think, in the prompt."""
