"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel, Discriminator, Field, Tag

from headrace_server.protocols.base import MAX_SEQUENCES, Count, Refusal, Text, TokenIds
from headrace_server.protocols.openai.bodies.sampling import SAMPLING_REFUSALS, SamplingBody
from headrace_server.protocols.openai.bodies.usage import Usage

MAX_EMBEDS = 64 * 1024 * 1024
"""Characters of one prompt's embeddings."""


def _prompt_form(value: Any) -> str:
    """Decide by the first item, so that a long list is checked against one form only."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, (str, list)):
        return "<several>"
    return "<ids>"


def _item_form(value: Any) -> str:
    return "<ids>" if isinstance(value, list) else "<text>"


PromptItem = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")], Discriminator(_item_form)
]
PromptField = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[PromptItem], Field(min_length=1, max_length=MAX_SEQUENCES), Tag("<several>")],
    Discriminator(_prompt_form),
]
EmbedsText = Annotated[str, Field(min_length=1, max_length=MAX_EMBEDS)]


_CHATS = "belongs to /v1/chat/completions; no template is applied here"
COMPLETION_REFUSALS: Mapping[str, Refusal] = {
    **SAMPLING_REFUSALS,
    "mm_processor_kwargs": Refusal("media come with chats"),
    "suffix": Refusal("insertion is not supported"),
    "max_completion_tokens": Refusal("is called max_tokens here"),
    "top_logprobs": Refusal("is called logprobs here, and is a number", 0),
    "messages": Refusal(_CHATS),
    "chat_template": Refusal(_CHATS),
    "chat_template_kwargs": Refusal(_CHATS, {}),
    "documents": Refusal(_CHATS, []),
    "tools": Refusal(_CHATS, []),
    "tool_choice": Refusal(_CHATS, "none", "auto"),
    "parallel_tool_calls": Refusal(_CHATS, True),
    "reasoning_effort": Refusal(_CHATS),
    "verbosity": Refusal(_CHATS),
    "include_reasoning": Refusal("texts are not parsed here", True),
    "add_generation_prompt": Refusal(_CHATS, True),
    "continue_final_message": Refusal(_CHATS, False),
}


class CompletionRequest(SamplingBody):
    """Continue one prompt or several."""

    refused: ClassVar[Mapping[str, Refusal]] = COMPLETION_REFUSALS

    prompt: PromptField | None = Field(
        None, description="A text, token ids, or a list whose items are either."
    )
    prompt_embeds: (
        EmbedsText
        | Annotated[list[EmbedsText], Field(min_length=1, max_length=MAX_SEQUENCES)]
        | None
    ) = Field(
        None,
        description="Embeddings of prompts, base64 of a safetensors or torch file each (the server "
        "runs with --enable-prompt-embeds). Their completions precede those of prompt.",
    )
    max_tokens: Count | None = Field(
        16, description="Null: until the context is full. 0: only with echo."
    )
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="This many likeliest tokens per position, and the chosen one."
    )
    add_special_tokens: bool = True


class CompletionLogprobs(BaseModel):
    """Log-probabilities, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """One token at one prompt position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobsField = list[dict[str, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobsField | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """Answer of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str
    weights_versions: list[str] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChunkLogprobs(Struct):
    """:class:`CompletionLogprobs` of the tokens of one chunk."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChunkPromptLogprob(Struct):
    """:class:`PromptLogprob` as it is encoded."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: ChunkLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Struct):
    """One event of a streamed completion."""

    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str
    usage: Any = UNSET
    weights_versions: list[str] | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
