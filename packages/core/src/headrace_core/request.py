"""Prompts as callers give them, and a request as the engine's core takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from headrace_core.sampling import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into a prompt."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI-style messages; content is text or a list of text parts."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    """Replaces the model's template. From a client only if the operator trusts clients."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_format: str = "auto"
    """``auto``, ``string`` or ``openai``: what the template expects ``content`` to be."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    cache_salt: str | None = None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | ChatPrompt
"""Everything that ``generate`` accepts as one prompt."""


@dataclass(slots=True)
class CoreRequest:
    """A request on its way into the engine's core: token ids only, checked against the model.

    Crosses the process border as msgpack.
    """

    request_id: str
    """Unique within the engine; made by headrace, whatever a client asked for."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """With ``n`` = 1: several completions are several core requests."""
    stop_token_ids: frozenset[int]
    """All tokens that end the output, EOS included."""
    max_tokens: int
    """Resolved: never past the context's end."""
    arrival_time: float
    """``time.time()`` when the request was taken in."""
    priority: int = 0
    """Lower first, under the priority policy."""
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    """``params.bad_words`` as token sequences."""
    owner: str = ""
    """Who shares the engine under the fair policy (:mod:`headrace_core.owner`)."""
