"""Inputs of a body that are pooled: prompts, and the two sides of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt, TextPrompt, TokensPrompt
from headrace_server.chat.prompts import engine_prompt, need_template, special_tokens
from headrace_server.protocols.base import check_size
from headrace_server.protocols.openai.bodies.pooling import (
    ChatInput,
    ContentObject,
    PoolingBody,
    TextInput,
    TextObject,
)
from headrace_server.requests.convert import CLIENT_PLACE, chat_prompt, content_parts
from headrace_server.state import ServerState


class PoolingInputs(NamedTuple):
    """Prompts, and whether the tokenizer adds special tokens to them."""

    prompts: list[Prompt]
    special: bool | None
    field: str
    """Where they came from."""


def inputs_of(body: PoolingBody, state: ServerState) -> PoolingInputs:
    """The prompts of a body; a conversation is one.

    Raises:
        RequestError: a conversation cannot be written, naming the message and part.
    """
    if isinstance(body, ChatInput):
        need_template(state.engine.model, state.settings, body.chat_template)
        chat = chat_prompt(body, state)
        prompt = engine_prompt(chat, state)
        return PoolingInputs([prompt], special_tokens(prompt), "messages")
    assert isinstance(body, TextInput)
    given = body.input
    is_one = isinstance(given, str) or isinstance(given[0], int)
    many: list[Any] = [given] if is_one else list(given)
    return PoolingInputs([_prompt(one) for one in many], body.add_special_tokens, "input")


def _prompt(given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(prompt=given)
    return TokensPrompt(prompt_token_ids=given)


def sides_of(
    field: str,
    given: str | TextObject | ContentObject | list[str | TextObject],
    modalities: Sequence[str],
) -> list[ScoreInput]:
    """The texts and media of a field; each part of a content object is one.

    Args:
        modalities: that the model takes.

    Raises:
        RequestError: a part is neither text nor such media.
    """
    if isinstance(given, ContentObject):
        return [
            part["text"] if part["type"] == "text" else {"content": [part]}
            for part in _placed_parts(field, given, modalities)
        ]
    several = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else one.text for one in several]


def query_of(given: str | TextObject | ContentObject, modalities: Sequence[str]) -> ScoreInput:
    """The one query of a rerank: text in parts is joined.

    Raises:
        RequestError: a part is neither text nor media that the model takes.
    """
    if not isinstance(given, ContentObject):
        return given if isinstance(given, str) else given.text
    parts = _placed_parts("query", given, modalities)
    if any(part["type"] != "text" for part in parts):
        return {"content": parts}
    return "\n".join(part["text"] for part in parts)


def _placed_parts(
    field: str, given: ContentObject, modalities: Sequence[str]
) -> list[dict[str, Any]]:
    """Parts of an object, of which those with media say where the client has their content."""
    parts = content_parts(field, given.content, modalities)
    return [
        part
        if part["type"] == "text"
        else {**part, CLIENT_PLACE: f"{field}.content[{index}].{part['type']}"}
        for index, part in enumerate(parts)
    ]


def document_text(index: int, given: Mapping[str, Any], fields: list[str] | None) -> str:
    """The text of a document that is an object: its ``text``, or the fields to be read, each on a
    line of its own.

    Raises:
        RequestError: it has none of them, or one that is no text.
    """
    check_size(f"documents[{index}]", given)
    names = fields or ["text"]
    found = [(name, given[name]) for name in names if name in given]
    for name, value in found:
        if not isinstance(value, str):
            raise RequestError(
                f"documents[{index}].{name}: must be a string", param="documents", value=value
            )
    if not found:
        raise RequestError(
            f"documents[{index}]: must be a text, or an object with {' or '.join(map(repr, names))}; media "
            'come as {"content": [parts]} in place of the list, each part a document',
            param="documents",
        )
    return "\n".join(text for _, text in found)
