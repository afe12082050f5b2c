"""Token counts of an answer."""

from __future__ import annotations

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Purposes of completion tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    """Guesses of speculative decoding that were right; then those that were wrong."""
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """None: nothing of the answer was parsed as reasoning, and nothing was guessed."""
