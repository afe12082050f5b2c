"""``POST /v1/chat/completions/batch``: many conversations for one answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_server.protocols.base import MAX_SEQUENCES
from headrace_server.protocols.openai.bodies.chat import (
    ChatChoice,
    ChatRequest,
    ChatResponse,
    Messages,
)
from headrace_server.protocols.openai.bodies.completions import PromptLogprobsField


class BatchChatRequest(ChatRequest):
    """Answer several conversations. All other fields hold for each of them."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_SEQUENCES)] = Field(  # type: ignore[assignment]
        description="A list of conversations. The answers to conversation i are the choices i * n to "
        "i * n + n - 1."
    )


class BatchChatChoice(ChatChoice):
    """One answer to one of the conversations."""

    prompt_token_ids: list[int] | None = Field(None, description="With the first of n answers.")
    prompt_logprobs: PromptLogprobsField | None = Field(
        None, description="With the first of n answers."
    )


class BatchChatResponse(ChatResponse):
    """Answer of ``POST /v1/chat/completions/batch``; ``usage`` is the sum."""

    choices: list[BatchChatChoice]  # type: ignore[assignment]
