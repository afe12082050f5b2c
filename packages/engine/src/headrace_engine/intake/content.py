"""Chat messages in the form that a template expects."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.intake.media import ChatMedia
from headrace_engine.intake.sandbox import COMPILED_TEMPLATES, environment

CONTENT_FORMATS = ("auto", "string", "openai")
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part type -> the key that holds its text."""


@functools.lru_cache(COMPILED_TEMPLATES)
def detect_content_format(source: str) -> str:
    """``openai`` if the template goes through the parts of a message's content, else ``string``.

    What counts: a ``for`` over ``<something>.content`` (or ``['content']``), over a variable that
    was set to it, or over a macro's parameter that is called with it.
    """
    try:
        tree = environment().parse(source)
    except jinja2.TemplateSyntaxError:
        return "string"  # rendering will say what is wrong
    names = _content_names(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that (somewhere) hold a message's content."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        known = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                names.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            names.update(_content_parameters(call, macro, names))
        if len(names) == known:
            return names


def _content_parameters(
    call: nodes.Call, macro: nodes.Macro | None, names: set[str]
) -> Iterator[str]:
    if macro is None:
        return
    for parameter, argument in zip(macro.args, call.args):
        if _is_content(argument, names):
            yield parameter.name
    for keyword in call.kwargs:
        if _is_content(keyword.value, names):
            yield keyword.key


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


def normalize_messages(
    messages: object, content_format: str, media: ChatMedia | None = None
) -> list[dict[str, Any]]:
    """Messages with ``content`` as one string, or as a list of typed parts.

    Tool calls' arguments, JSON text on the wire, become objects: templates write them as JSON
    themselves.

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
        made["content"] = "\n".join(part.text for part in parts)
    if message.get("tool_calls"):
        made["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    else:
        made.pop("tool_calls", None)  # templates ask whether the key is there
    return made


class _Part(NamedTuple):
    """One part of a message."""

    text: str
    """What it says, or what stands for it."""
    kind: str = "text"


def _parts(content: Any, path: str, media: ChatMedia) -> list[_Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [_Part(content)]
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{path}: must be text, a list of parts, or null, not {type(content).__name__}",
            param=path,
        )
    return [_part(part, f"{path}[{index}]", media) for index, part in enumerate(content)]


def _part(part: Any, path: str, media: ChatMedia) -> _Part:
    if isinstance(part, str):
        return _Part(part)
    if not isinstance(part, Mapping):
        raise RequestError(f"{path}: must be text or an object", param=path)
    taken = media.take(part, path)
    if taken is not None:
        modality, placeholder = taken
        return _Part(placeholder, modality)
    kind = part.get("type", "text" if "text" in part else None)
    if kind not in TEXT_PARTS:
        raise UnsupportedFeature(
            f"{path}.type = {kind!r:.100}: this model takes text only, as one of "
            f"{', '.join(TEXT_PARTS)}",
            param=f"{path}.type",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        name = f"{path}.{TEXT_PARTS[kind]}"
        raise RequestError(f"{name}: must be text, not {type(text).__name__}", param=name)
    return _Part(text)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{path}: must be a list", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        name = f"{path}.function.arguments"
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            raise RequestError(f"{name}: must be JSON text", param=name) from None
    return {**call, "function": {**function, "arguments": arguments}}
