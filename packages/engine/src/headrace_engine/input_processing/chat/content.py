"""Chat messages in the form that a template expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.input_processing.chat.arguments import MAX_ARGUMENTS, arguments_object
from headrace_engine.input_processing.media import TEXT_PARTS, ChatMedia

CONTENT_FORMATS = ("auto", "string", "openai")


def normalize_messages(
    messages: object, content_format: str, media: ChatMedia | None = None
) -> list[dict[str, Any]]:
    """Messages with ``content`` as one string, or as a list of typed parts.

    Tool calls' arguments, JSON text on the wire, become objects: templates write them as JSON
    themselves. What was cut counts as far as it came
    (:mod:`headrace_engine.input_processing.chat.arguments`).

    Args:
        media: takes parts that are no text. In their place is a part of the modality's type, which
            templates that go through parts know, or the text that stands for it.

    Raises:
        RequestError: naming message and field (``messages[2].content[0].type``).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("messages: must be a non-empty list", param="messages")
    media = media if media is not None else ChatMedia(None)
    return [_message(m, f"messages[{i}]", content_format, media) for i, m in enumerate(messages)]


class PairSides(NamedTuple):
    """The two sides of a pair: texts, or lists of parts as in a chat message."""

    query: str | Sequence[Mapping[str, Any]]
    document: str | Sequence[Mapping[str, Any]]
    query_name: str = "text_1"
    """As messages call it."""
    document_name: str = "text_2"

    def messages(self) -> list[dict[str, Any]]:
        """The messages that a template for pairs gets."""
        return [
            {"role": "query", "content": self.query},
            {"role": "document", "content": self.document},
        ]

    def normalize(
        self, messages: Sequence[Mapping[str, Any]], content_format: str, media: ChatMedia
    ) -> list[dict[str, Any]]:
        """:func:`normalize_messages` of :meth:`messages`, whose order may be another."""
        names = {"query": self.query_name, "document": self.document_name}
        return [_message(m, names[m["role"]], content_format, media) for m in messages]


def _message(
    message: Mapping[str, Any], path: str, content_format: str, media: ChatMedia
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path}: must be an object", param=path)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{path}.role = {message.get('role')!r:.100}: must be a non-empty "
                           "string", param=f"{path}.role")  # fmt: skip
    made = dict(message)
    parts = _parts(message.get("content"), f"{path}.content", media)
    if content_format == "openai":
        made["content"] = [
            {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in parts
        ]
    else:
        ordered = (
            parts if media.interleaves else sorted(parts, key=lambda part: part.kind == "text")
        )
        made["content"] = "\n".join(part.text for part in ordered)
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    else:
        made.pop("tool_calls", None)  # templates ask whether the key is there
    return made


class _ContentPart(NamedTuple):
    """One part of a message."""

    text: str
    """The part's text, or what stands for it."""
    kind: str = "text"


def _parts(content: Any, path: str, media: ChatMedia) -> list[_ContentPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [_ContentPart(content)]
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{path}: must be text, a list of parts, or null, not {type(content).__name__}",
            param=path,
        )
    return [_part(part, f"{path}[{index}]", media) for index, part in enumerate(content)]


def _part(part: Any, path: str, media: ChatMedia) -> _ContentPart:
    if isinstance(part, str):
        return _ContentPart(part)
    if not isinstance(part, Mapping):
        raise RequestError(f"{path}: must be text or an object", param=path)
    taken = media.take(part, path)
    if taken is not None:
        modality, placeholder = taken
        return _ContentPart(placeholder, modality)
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise UnsupportedFeature(
            f"{path}.type = {kind!r:.100}: {media.accepted()}", param=f"{path}.type"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        name = f"{path}.{TEXT_PARTS[kind]}"
        raise RequestError(f"{name}: must be text, not {type(text).__name__}", param=name)
    return _ContentPart(text)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{path}: must be a list", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    if not isinstance(function.get("name", ""), str):
        name = f"{path}.function.name"
        raise RequestError(
            f"{name} = {function['name']!r:.80}: must be the called function's name", param=name
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        name = f"{path}.function.arguments"
        if len(arguments or "") > MAX_ARGUMENTS:
            raise RequestError(
                f"{name}: {len(arguments or '')} characters; at most {MAX_ARGUMENTS}", param=name
            )
        arguments = arguments_object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
