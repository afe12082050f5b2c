"""Items -> chat messages, and the pieces of a request that belong to a chat.

What a model wrote in one turn (reasoning, text, calls) is several items and becomes one assistant
message again, as the model's template expects it; so the prompt of a further turn begins with the
tokens of the turn before and is found in the cache. The specification maps each call to a message
of its own; templates write parallel calls as one message, and so did the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.protocols.base import check_size
from headrace_server.protocols.responses.opaque import opened
from headrace_server.protocols.responses.protocol import (
    CodeInterpreterCallItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    LocalShellCallItem,
    McpCallItem,
    MessageItem,
    OtherItem,
    ReasoningItem,
    WebSearchCallItem,
)
from headrace_server.requests.convert import CLIENT_PLACE

AnyItem = (
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | McpCallItem
    | WebSearchCallItem | CodeInterpreterCallItem | CustomToolCallItem | CustomToolCallOutputItem
    | LocalShellCallItem | OtherItem
)  # fmt: skip
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal",
          "summary_text": "text", "reasoning_text": "text"}  # fmt: skip
_MEDIA = ("input_image", "input_file", "input_audio", "input_video", "computer_screenshot")
_TAKEN = {"input_image": "image", "input_audio": "audio"}
"""Type of a part -> the modality of a model that takes it."""
_DETAILS = ("auto", "low", "high")
_TEXT_ONLY = "this model takes text only"
_LEADING = ("system", "developer")


class _Assistant:
    """One turn of the model while its items are gathered. Order: reasoning, text, calls."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": "".join(self.texts) or None}
        if self.reasoning:
            made["reasoning"] = "\n".join(self.reasoning)
        if self.calls:
            made["tool_calls"] = self.calls
        elif made["content"] is None:
            made["content"] = ""
        return made


class _Conversation:
    """Chat messages that grow by items."""

    def __init__(self, history: Sequence[dict[str, Any]], modalities: Sequence[str]) -> None:
        self.messages, self.modalities = [_from_before(m) for m in history], modalities
        self._turn: _Assistant | None = None
        self._names = {
            call["id"]: call["function"]["name"]
            for message in history
            for call in message.get("tool_calls") or ()
        }
        """Calls seen so far: id -> name."""

    def end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None

    def turn(self, *, new: bool = False) -> _Assistant:
        if new:
            self.end_turn()
        self._turn = self._turn or _Assistant()
        return self._turn

    def add_reasoning(self, text: str) -> None:
        said = self._turn is not None and (self._turn.texts or self._turn.calls)
        self.turn(new=bool(said)).reasoning.append(text)

    def add_content(self, text: str) -> None:
        said = self._turn is not None and (self._turn.texts or self._turn.calls)
        self.turn(new=bool(said)).texts.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self.turn().calls.append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def add_result(self, where: str, call_id: str, content: Any) -> None:
        self.end_turn()
        name = self._names.get(call_id)
        if name is None:
            raise RequestError(
                f"{where}.call_id = {call_id[:64]!r}: no call of that id comes before",
                param=f"{where}.call_id",
            )
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
        )


def _from_before(message: dict[str, Any]) -> dict[str, Any]:
    """A message of an earlier request, whose parts have no place in this one."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        {**part, CLIENT_PLACE: "previous_response_id"} if CLIENT_PLACE in part else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def to_messages(
    items: Sequence[AnyItem],
    history: Sequence[dict[str, Any]] = (),
    *,
    note: Callable[[str], None],
    developer: bool = False,
    modalities: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The chat of a list of items.

    Args:
        history: messages of the conversation so far.
        modalities: that messages may bring beside text.
        note: is told of what is left out.
        developer: the model knows the developer role; for others it is the system's.

    Raises:
        RequestError: naming the item.
    """
    talk = _Conversation(history, modalities)
    for index, item in enumerate(items):
        _add(talk, f"input[{index}]", item, developer, note)
    talk.end_turn()
    return talk.messages


def with_instructions(messages: list[dict[str, Any]], text: str | None) -> list[dict[str, Any]]:
    """The chat with a system message in front, and no more than one there."""
    told = [{"role": "system", "content": text}, *messages] if text else messages
    return _one_system_message(told)


def _add(
    talk: _Conversation, where: str, item: AnyItem, developer: bool, note: Callable[[str], None]
) -> None:
    match item:
        case MessageItem(role="assistant"):
            _only_text(talk, where, item)
            talk.add_content(_joined(_content(where, item.content)))
        case MessageItem():
            talk.end_turn()
            if item.role in _LEADING:
                _only_text(talk, where, item)
            role = "system" if item.role == "developer" and not developer else item.role
            found = _content(where, item.content, modalities=talk.modalities)
            talk.messages.append({"role": role, "content": found})
        case ReasoningItem():
            thought = _reasoning(item)
            if thought is None:
                note("encrypted reasoning of another server")
            else:
                talk.add_reasoning(thought)
        case FunctionCallItem():
            talk.add_call(item.call_id, item.name, item.arguments)
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            output = _content(where, item.output, "output", talk.modalities)
            talk.add_result(where, item.call_id, output)
        case CustomToolCallItem():
            talk.add_call(item.call_id, item.name, _custom_arguments(item.input))
        case LocalShellCallItem():
            check_size(where, item.action)
            arguments = msgspec.json.encode(item.action).decode()
            talk.add_call(item.call_id, "local_shell", arguments)
        case McpCallItem():
            call_id = item.id or where
            talk.add_call(call_id, item.name, item.arguments)
            talk.add_result(where, call_id, item.output or _failure(item.error))
        case WebSearchCallItem() | CodeInterpreterCallItem():
            pass  # its result is in the answer that followed; the item holds none
        case OtherItem():
            raise UnsupportedFeature(
                f"{where}: items of type {str(item.type)[:64]!r} are not supported",
                param=f"{where}.type",
            )


def _only_text(talk: _Conversation, where: str, item: MessageItem) -> None:
    """Raises: UnsupportedFeature: a message brings media, and one of its role may not, though the model takes
    some."""
    if isinstance(item.content, str) or not talk.modalities:
        return
    for index, part in enumerate(item.content):
        if part.get("type") in _MEDIA:
            place = f"{where}.content[{index}]"
            raise UnsupportedFeature(
                f"{place}: parts of type {part['type']!r} are not supported in messages of role "
                f"{item.role!r}, which take text only",
                param=f"{place}.type",
            )


def _failure(error: Any) -> str:
    """Error of a call that this server made, as the model was told."""
    content = error.get("content") if isinstance(error, dict) else error
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _reasoning(item: ReasoningItem) -> str | None:
    """Text of earlier reasoning: its own, else that of the opaque content, else the summary; None: only
    another server could read it."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        found = opened(item.encrypted_content)
        if found is not None:
            return found
    if item.summary or item.encrypted_content is None:
        return "\n".join(part.text for part in item.summary)
    return None


def _custom_arguments(text: str) -> str:
    """The input of a call of a custom tool, as a function's arguments."""
    return msgspec.json.encode({"input": text}).decode()


def _content(
    where: str,
    content: str | list[dict[str, Any]],
    name: str = "content",
    modalities: Sequence[str] = (),
) -> Any:
    """A text, or its parts if there are several, or other than text."""
    if isinstance(content, str):
        return content
    check_size(where, content)
    parts = [_part(f"{where}.{name}[{i}]", part, modalities) for i, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _part(where: str, part: dict[str, Any], modalities: Sequence[str]) -> dict[str, Any]:
    """A part of a chat's message."""
    kind = part.get("type")
    if kind == "input_image" and "image" in modalities:
        return _image(where, part)
    if kind == "input_audio" and "audio" in modalities:
        place = f"{where}.input_audio.data"
        return {"type": kind, kind: part.get(kind), CLIENT_PLACE: place}
    return {"type": "text", "text": _text(where, part, modalities)}


def _image(where: str, part: dict[str, Any]) -> dict[str, Any]:
    url, detail = part.get("image_url"), part.get("detail")
    if not isinstance(url, str):
        raise RequestError(
            f"{where}.image_url: must be text: a URL, or a data: URL with base64 content; no files are "
            "kept here",
            param=f"{where}.image_url",
        )
    if detail not in (None, *_DETAILS):
        raise RequestError(
            f"{where}.detail = {detail!r:.100}: must be one of {', '.join(_DETAILS)}, or absent",
            param=f"{where}.detail",
        )
    return {"type": "image_url", "image_url": url, CLIENT_PLACE: f"{where}.image_url"}


def _text(where: str, part: dict[str, Any], modalities: Sequence[str]) -> str:
    kind = part.get("type")
    taken = [name for name, own in _TAKEN.items() if own in modalities]
    if kind in _MEDIA:
        accepted = f"must be one of input_text, {', '.join(taken)}" if taken else _TEXT_ONLY
        raise UnsupportedFeature(
            f"{where}: parts of type {kind!r} are not supported; {accepted}",
            param=f"{where}.type",
        )
    key = _TEXTS.get(kind) if isinstance(kind, str) else None
    text = None if key is None else part.get(key)
    if key is None:
        raise RequestError(
            f"{where}: type = {str(kind)[:64]!r} must be one of {[*sorted(_TEXTS), *taken]}",
            param=f"{where}.type",
        )
    if not isinstance(text, str):
        raise RequestError(f"{where}.{key}: must be a string", param=f"{where}.{key}")
    return text


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and system messages at the beginning as one: many templates take no more."""
    count = 0
    while count < len(messages) and messages[count]["role"] in _LEADING:
        count += 1
    if count < 2 or len({m["role"] for m in messages[:count]}) > 1:
        return messages
    text = "\n\n".join(_joined(m["content"]) for m in messages[:count])
    return [{"role": messages[0]["role"], "content": text}, *messages[count:]]
