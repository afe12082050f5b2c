"""Prompts of conversations: a body's messages and settings as the engine is given them."""

from __future__ import annotations

from headrace_core.errors import UnsupportedFeature
from headrace_core.request import ChatPrompt, Prompt, TextPrompt
from headrace_core.served_model import ServedModel
from headrace_server.harmony.prompt import is_harmony, render
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.requests import convert
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState
from headrace_server.tools.base import Namespace


def can_chat(model: ServedModel, settings: ServerSettings) -> bool:
    """True if conversations can be written for a model: by a template, or in the gpt-oss format."""
    return model.has_chat_template or settings.chat_template is not None or is_harmony(model)


def need_template(model: ServedModel, settings: ServerSettings, template: str | None) -> None:
    """Raises UnsupportedFeature if conversations cannot be written, not even by a request's own
    template."""
    if not can_chat(model, settings) and template is None:
        raise UnsupportedFeature(
            "messages: the model has no chat template; start the server with --chat-template",
            param="messages",
        )


def special_tokens(prompt: Prompt) -> bool | None:
    """True if the tokenizer adds special tokens: a rendered text has its own."""
    return None if isinstance(prompt, ChatPrompt) else False


async def count_tokens(state: ServerState, prompt: Prompt) -> int:
    """Tokens of a prompt of :func:`turn_prompt`, as it would be run."""
    special = special_tokens(prompt)
    return len((await state.engine.tokenize(prompt, add_special_tokens=special)).token_ids)


def turn_prompt(
    body: ChatRequest, state: ServerState, builtin: tuple[Namespace, ...] = ()
) -> Prompt:
    """The prompt that the engine is given for a body: see :func:`engine_prompt`.

    Raises:
        RequestError: naming the message and part.
    """
    return engine_prompt(chat_prompt_of(body, state), state, builtin)


def chat_prompt_of(body: ChatRequest, state: ServerState) -> ChatPrompt:
    """The conversation of a body, its messages and settings in one form.

    Raises:
        RequestError: naming the message and part.
    """
    drops = state.settings.exclude_tools_when_tool_choice_none
    return convert.chat_prompt(
        body,
        state,
        salt=body.cache_salt,
        with_tools=not (drops and body.tool_choice == "none"),
        effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )


def engine_prompt(
    chat: ChatPrompt, state: ServerState, builtin: tuple[Namespace, ...] = ()
) -> ChatPrompt | TextPrompt:
    """A conversation for the model's template, or in the gpt-oss format as we write it.

    A template that the operator (or a trusted client) brought wins over both.

    Args:
        builtin: tools that the server calls itself.

    Raises:
        RequestError: the format cannot say something; naming the field.
    """
    brought = chat.chat_template is not None or state.chat_template is not None
    if not is_harmony(state.engine.model) or brought:
        return chat
    text = TextPrompt(
        prompt=render(chat, builtin, special_tokens=state.engine.model.special_tokens)
    )
    if chat.cache_salt is not None:
        text["cache_salt"] = chat.cache_salt
    return text
