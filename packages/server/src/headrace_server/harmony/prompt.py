"""Prompts in the gpt-oss format: system and developer message, history, the opened answer."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_core.served_model import ServedModel
from headrace_server.chat.tool_choice import check_tools
from headrace_server.harmony.messages import (
    EFFORTS,
    HarmonyMessage,
    drop_old_analysis,
    from_chat,
    text_of,
)
from headrace_server.harmony.schema import parameters_type
from headrace_server.tools.base import Namespace, Tool

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TAGS = frozenset(
    {START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN, "<|endoftext|>", "<|startoftext|>"}
)
_TAG = re.compile(r"<\|[a-z0-9_]{1,64}\|>")
"""Pattern of every tag."""
_GUARD = "\N{WORD JOINER}"
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE = "2024-06"
"""The models' knowledge cut-off, as published."""


def is_harmony(model: ServedModel) -> bool:
    """True if a model speaks this format."""
    return model.architecture.startswith("GptOss")


def render(
    prompt: ChatPrompt,
    builtin: Sequence[Namespace] = (),
    *,
    effort: str | None = None,
    today: datetime.date | None = None,
    special_tokens: Iterable[str] = (),
) -> str:
    """The text of a conversation's prompt.

    Texts of tags inside messages are broken up by a word joiner: nobody's message can open
    another role's.

    Args:
        builtin: tools that the server calls.
        special_tokens: the model's, which are tags besides the format's own.
        effort: ``low``, ``medium`` (default) or ``high``; wins over the template variable
            ``reasoning_effort``.

    Raises:
        RequestError: the effort is another word, or a role holds a tag.
        UnsupportedFeature: the last message is to be continued, or there are documents.
    """
    if prompt.continue_final_message:
        raise UnsupportedFeature(
            "continue_final_message: this model's format cannot continue a message",
            param="continue_final_message",
        )
    if prompt.documents:
        raise UnsupportedFeature(
            "documents: this model's format has no documents; send them as messages",
            param="documents",
        )
    chosen = effort or prompt.chat_template_kwargs.get("reasoning_effort") or "medium"
    if chosen not in EFFORTS:
        raise RequestError(
            f"reasoning effort = {str(chosen)[:32]!r}: must be one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    tags = TAGS.union(special_tokens)
    _check_roles(prompt.messages, tags)
    day = today or datetime.datetime.now(datetime.UTC).date()
    tools = _tools(prompt)
    messages = [_system(day, chosen, bool(tools), builtin)]
    developer = _developer(prompt.messages, tools)
    if developer:
        messages.append(HarmonyMessage("developer", developer))
    history = from_chat(prompt.messages, [space.label for space in builtin])
    messages += drop_old_analysis(history)
    opened = f"{START}assistant" if prompt.add_generation_prompt else ""
    return "".join(render_message(message, tags) for message in messages) + opened


def _check_roles(messages: Sequence[Mapping[str, Any]], tags: Collection[str]) -> None:
    for index, message in enumerate(messages):
        role = message["role"]
        if _guard(role, tags) != role:
            raise RequestError(
                f"messages[{index}].role = {role[:100]!r}: must not hold the text of a control token",
                param=f"messages[{index}].role",
            )


def render_message(message: HarmonyMessage, tags: Collection[str] = TAGS) -> str:
    """One message with its tags; those in its text are broken up."""
    head = START + _guard(message.author, tags)
    if message.recipient is not None and message.channel is None:
        head += f" to={_guard(message.recipient, tags)}"
    if message.channel is not None:
        to = "" if message.recipient is None else f" to={_guard(message.recipient, tags)}"
        if message.author != "assistant" and to:  # a tool's answer names its recipient first
            head, to = head + to, ""
        head += f"{CHANNEL}{message.channel}{to}"
    if message.content_type is not None:
        head += f" {message.content_type}"
    return f"{head}{MESSAGE}{_guard(message.text, tags)}{CALL if message.is_call else END}"


def _guard(text: str, tags: Collection[str]) -> str:
    def broken(found: re.Match[str]) -> str:
        tag = found[0]
        return tag[:1] + _GUARD + tag[1:] if tag in tags else tag

    return _TAG.sub(broken, text)


def _system(
    day: datetime.date, effort: str, functions: bool, builtin: Sequence[Namespace]
) -> HarmonyMessage:
    parts = [
        f"{_IDENTITY}\nKnowledge cutoff: {_KNOWLEDGE}\nCurrent date: {day.isoformat()}",
        f"Reasoning: {effort}",
    ]
    if builtin:
        parts.append("# Tools")
        parts += [_namespace(space) for space in builtin]
    channels = (
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    if functions:
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return HarmonyMessage("system", "\n\n".join([*parts, channels]))


def _tools(prompt: ChatPrompt) -> list[Mapping[str, Any]]:
    """The request's tools, and those that developer messages bring.

    Raises:
        RequestError: these are malformed.
    """
    found = list(prompt.tools or ())
    for index, message in enumerate(prompt.messages):
        given = message.get("tools")
        if message["role"] != "developer" or not given:
            continue
        if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
            raise RequestError(
                f"messages[{index}].tools: must be a list of functions", param="messages"
            )
        places = [f"messages[{index}].tools[{i}].function.parameters" for i in range(len(given))]
        check_tools(given, places)
        found += given
    return found


def _developer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    told = [text_of(m.get("content")) for m in messages if m["role"] in ("system", "developer")]
    parts = []
    if any(told):
        parts.append("# Instructions\n\n" + "\n\n".join(filter(None, told)))
    if tools:
        functions = [_function(tool["function"]) for tool in tools]
        parts.append("# Tools\n\n" + _namespace(Namespace("functions", None, tuple(functions))))
    return "\n\n".join(parts)


def _function(function: Mapping[str, Any]) -> Tool:
    schema = function.get("parameters")
    return Tool(
        str(function["name"]),
        str(function.get("description") or ""),
        schema if isinstance(schema, Mapping) else {},
    )


def _namespace(space: Namespace) -> str:
    head = f"## {space.label}\n\n"
    about = "".join(f"// {line}\n" for line in (space.description or "").splitlines())
    if space.label == "python":  # takes code, not parameters
        return head + (space.description or "Runs Python code.")
    types = "\n\n".join(_type(tool) for tool in space.tools)
    return f"{head}{about}namespace {space.label} {{\n\n{types}\n\n}} // namespace {space.label}"


def _type(tool: Tool) -> str:
    about = "".join(f"// {line}\n" for line in tool.description.splitlines())
    return f"{about}type {tool.name} = {parameters_type(tool.schema)};"
