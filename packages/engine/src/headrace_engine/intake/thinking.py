"""The bound of a request's reasoning (``thinking_token_budget``)."""

from __future__ import annotations

from headrace_core.errors import UnsupportedFeature
from headrace_core.request import ThinkingBudget
from headrace_core.sampling import SamplingParams
from headrace_core.text import ReasoningParser, Tokenizer
from headrace_engine.intake.prompts import PromptTokens
from headrace_engine.intake.tokens import need_tokenizer

_PROMPT_END = 64
"""Tokens of a prompt in which a template may have begun, or ended, the reasoning."""


def thinking_budget(
    params: SamplingParams,
    parser: type[ReasoningParser] | None,
    tokenizer: Tokenizer | None,
    tokens: PromptTokens,
) -> ThinkingBudget | None:
    """The bound of a request's reasoning, unless its prompt has ended that already.

    Raises:
        UnsupportedFeature: a bound, and nobody knows how the reasoning ends.
    """
    budget = params.thinking_token_budget
    if budget is None:
        return None
    if parser is None or not parser.end_marker:
        raise UnsupportedFeature(
            f"thinking_token_budget = {budget}: must be absent unless the engine knows how the "
            "model's reasoning ends (--reasoning-parser, of a format with an end marker)",
            param="thinking_token_budget",
        )
    start, end = parser.start_marker, parser.end_marker
    wanted = params.structured_outputs
    written = end
    if wanted is not None and wanted.enable_in_reasoning:  # it may not admit the end marker
        written = parser.thought_end or end
    tokenizer = need_tokenizer(tokenizer, "thinking_token_budget")
    tail = "" if tokens.embeds is not None else tokenizer.decode(tokens.ids[-_PROMPT_END:]).rstrip()
    if tail.endswith(end):
        return None  # the template was told not to think
    is_open = bool(start) and tail.endswith(start)
    return ThinkingBudget(
        budget,
        tokenizer.encode(written, add_special_tokens=False),
        [] if is_open or not start else tokenizer.encode(start, add_special_tokens=False),
    )
