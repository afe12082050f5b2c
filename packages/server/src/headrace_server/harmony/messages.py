"""Chat messages -> messages of the gpt-oss format: channels, recipients, what history is kept."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headrace_core.errors import RequestError

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions"
ROLES = ("assistant", "developer", "system", "tool", "user")
_NEAR = 0.8
"""Roles at least so alike are near (:class:`difflib.SequenceMatcher`, ratio)."""
EFFORTS = ("low", "medium", "high")
BUILTIN_TOOLS: Mapping[str, str] = {
    "web_search_preview": "browser",
    "web_search": "browser",
    "code_interpreter": "python",
    "container": "container",
}
"""Types of built-in tools in requests -> the recipients that models write to."""


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message."""

    author: str
    """A role, or a tool's full name."""
    text: str
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None

    @property
    def is_call(self) -> bool:
        return self.author == "assistant" and self.recipient is not None


class Recipient(NamedTuple):
    """Whom a call is for."""

    server: str
    tool: str


def split_recipient(text: str) -> Recipient:
    """Server and tool: split at the first dot; without a dot both are the whole text."""
    server, dot, tool = text.partition(".")
    return Recipient(server, tool) if dot else Recipient(text, text)


def tool_kind(recipient: str) -> str:
    """``browser``, ``python``, ``container``, ``function``, or ``mcp`` for all others."""
    server = split_recipient(recipient).server
    if server == FUNCTIONS:
        return "function"
    return server if server in BUILTIN_TOOLS.values() else "mcp"


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part if isinstance(part, str) else part.get("text") for part in content)
    return "".join(text for text in texts if isinstance(text, str))


def from_chat(
    messages: Sequence[Mapping[str, Any]], builtin: Collection[str] = ()
) -> list[HarmonyMessage]:
    """User, assistant and tool messages of a chat. System and developer messages are left to
    :mod:`headrace_server.harmony.prompt`, which writes them in front.

    Args:
        builtin: servers of built-in tools; calls to other names are calls of functions.

    Raises:
        RequestError: a call is malformed, or a role misspelled.
    """
    result: list[HarmonyMessage] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            result += _assistant(message, builtin, names)
        elif role == "tool":
            result.append(_tool_result(message, names))
        elif role not in ("system", "developer"):
            _check_role(f"messages[{index}].role", role)
            result.append(HarmonyMessage(role, text_of(message.get("content"))))
    return result


def _check_role(place: str, role: str) -> None:
    """Refuse a role that is one of the format's but for a letter, its case or the space around it."""
    word = role.strip().lower()
    near = difflib.get_close_matches(word, ROLES, n=1, cutoff=_NEAR) if word.isalpha() else []
    if near and near[0] != role:
        raise RequestError(
            f"{place} = {role[:64]!r}: did you mean {near[0]!r}? The roles of this model's format are "
            f"{', '.join(map(repr, ROLES))}",
            param=place,
        )


def _assistant(
    message: Mapping[str, Any], builtin: Collection[str], names: dict[str, str]
) -> list[HarmonyMessage]:
    calls = message.get("tool_calls") or []
    parts = []
    if thought := message.get("reasoning"):
        parts.append(HarmonyMessage("assistant", thought, ANALYSIS))
    if text := text_of(message.get("content")):
        # Text next to a call is a preamble; it does not end the turn.
        parts.append(HarmonyMessage("assistant", text, COMMENTARY if calls else FINAL))
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "messages: a call in tool_calls must hold function, an object with a name",
                param="messages",
            )
        recipient = _recipient(function["name"], builtin)
        names[str(call.get("id"))] = recipient
        parts.append(_call(recipient, _arguments(function.get("arguments"))))
    return parts


def _arguments(given: Any) -> str:
    """JSON text; some clients send the object."""
    if given is None or isinstance(given, str):
        return given or ""
    return msgspec.json.encode(given).decode()


def _call(recipient: str, arguments: str) -> HarmonyMessage:
    if tool_kind(recipient) == "python":  # takes code as it is
        return HarmonyMessage("assistant", arguments, ANALYSIS, recipient, "code")
    channel = COMMENTARY if tool_kind(recipient) in ("function", "mcp") else ANALYSIS
    return HarmonyMessage("assistant", arguments, channel, recipient, "<|constrain|>json")


def _recipient(name: str, builtin: Collection[str]) -> str:
    return name if split_recipient(name).server in builtin else f"{FUNCTIONS}.{name}"


def _tool_result(message: Mapping[str, Any], names: Mapping[str, str]) -> HarmonyMessage:
    known = names.get(str(message.get("tool_call_id")))
    author = known or f"{FUNCTIONS}.{message.get('name') or 'unknown'}"
    channel = COMMENTARY if tool_kind(author) in ("function", "mcp") else ANALYSIS
    return HarmonyMessage(author, text_of(message.get("content")), channel, "assistant")


def drop_old_analysis(messages: Sequence[HarmonyMessage]) -> list[HarmonyMessage]:
    """Without the reasoning before the last final answer: the model was not trained to see it.

    Reasoning after it belongs to calls that are still under way, and stays.
    """
    last = max((i for i, m in enumerate(messages) if _is_final(m)), default=-1)
    return [m for i, m in enumerate(messages) if i > last or not _is_analysis(m)]


def _is_final(message: HarmonyMessage) -> bool:
    return message.author == "assistant" and message.channel == FINAL


def _is_analysis(message: HarmonyMessage) -> bool:
    thinks = message.author == "assistant" and message.channel == ANALYSIS
    return thinks and message.recipient is None
