"""What a body gives to be pooled: prompts, and the two sides of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.request import Prompt, TextPrompt, TokensPrompt
from headrace_core.scoring import ScoreInput
from headrace_server.conversation import need_template, special_tokens, spelled
from headrace_server.convert import chat_prompt, text_part
from headrace_server.protocol.base import check_size
from headrace_server.protocol.pooling import ChatInput, ContentObject, PoolingBody, TextInput
from headrace_server.state import ServerState


class Inputs(NamedTuple):
    """Prompts, and whether the tokenizer adds special tokens to them."""

    prompts: list[Prompt]
    special: bool | None
    field: str
    """Where they came from."""


def inputs_of(body: PoolingBody, state: ServerState) -> Inputs:
    """The prompts of a body; a conversation is one.

    Raises:
        RequestError: a conversation cannot be written, naming the message and part.
    """
    if isinstance(body, ChatInput):
        need_template(state.engine.model, state.settings, body.chat_template)
        chat = chat_prompt(body, state)
        prompt = spelled(chat, state)
        return Inputs([prompt], special_tokens(prompt), "messages")
    assert isinstance(body, TextInput)
    given = body.input
    is_one = isinstance(given, str) or isinstance(given[0], int)
    many: list[Any] = [given] if is_one else list(given)
    return Inputs([_prompt(one) for one in many], body.add_special_tokens, "input")


def _prompt(given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        return TextPrompt(prompt=given)
    return TokensPrompt(prompt_token_ids=given)


def side_of(field: str, given: str | list[str] | ContentObject) -> list[ScoreInput]:
    """The texts on one side of pairs; each part of a content object is one.

    Raises:
        RequestError: a part is no text.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, ContentObject):
        return list(texts_of(field, given))
    return list(given)


def texts_of(field: str, given: ContentObject) -> list[str]:
    """The texts of a content object's parts.

    Raises:
        RequestError: a part is no text.
    """
    parts = enumerate(given.content)
    return [text_part(f"{field}.content[{i}]", part, field)["text"] for i, part in parts]


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
            f"documents[{index}]: must have {' or '.join(map(repr, names))}", param="documents"
        )
    return "\n".join(text for _, text in found)
