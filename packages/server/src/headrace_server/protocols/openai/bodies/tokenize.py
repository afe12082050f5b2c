"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Discriminator, Field, Tag

from headrace_server.protocols.base import (
    MAX_TOKENS,
    FreeObject,
    Refusal,
    RequestBody,
    Text,
    TokenId,
    fields_of,
)
from headrace_server.protocols.known_fields import KnownFields
from headrace_server.protocols.openai.bodies.chat import TOOLS, Messages

_MODEL = Annotated[str, Field(max_length=1024)] | None
_REFUSED: Mapping[str, Refusal] = {
    "mm_processor_kwargs": Refusal("media input is not supported by this version; leave it out"),
}


class TokenizeTextRequest(RequestBody):
    """Tokens of a text."""

    refused: ClassVar[Mapping[str, Refusal]] = _REFUSED

    model: _MODEL = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(RequestBody):
    """Tokens of a conversation."""

    refused: ClassVar[Mapping[str, Refusal]] = _REFUSED
    also_known: ClassVar[Mapping[str, KnownFields | None]] = {"tools": TOOLS}

    model: _MODEL = None
    messages: Messages
    tools: Annotated[list[FreeObject], Field(max_length=1024)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    return_token_strs: bool | None = False
    chat_template: Text | None = None
    chat_template_kwargs: FreeObject | None = None
    documents: Annotated[list[FreeObject], Field(max_length=4096)] | None = None


def _form(value: Any) -> str:
    return "<chat>" if "messages" in fields_of(value) else "<text>"


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(_form),
]


class TokenizeResponse(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Text of tokens."""

    model: _MODEL = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str
