"""From Anthropic's messages to a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.chat.hosted_tools import without_foreign
from headrace_server.chat.tool_choice import check_name, function_tool, shown
from headrace_server.protocols.anthropic.protocol import (
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolChoice,
)
from headrace_server.protocols.base import check_size
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.bodies.sampling import CHAT_EXTENSIONS
from headrace_server.requests.constraints import check_one_form, constrained_by, spelling_of
from headrace_server.requests.convert import CLIENT_PLACE, as_chat

_COPIED = frozenset({*CHAT_EXTENSIONS, "stream", "temperature", "top_p"}) - {"chat_template_kwargs"}
_LEAST_BUDGET = 1024
_BEGINS: Mapping[str, str] = {
    "image/jpeg": "/9j/", "image/png": "iVBORw0KGg", "image/gif": "R0lGOD",
    "image/webp": "UklGR.{6}XRUJQ", "image/bmp": "Qk[0-3]",
}  # fmt: skip
"""Types of images -> how their content in base64 begins."""
SPELLING: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
}
"""Fields of a chat -> the client's."""
_FORCED = frozenset({"any", "tool"})
"""Types of ``tool_choice`` that leave no answer but calls."""


def spelling_in(body: MessagesRequest) -> Mapping[str, str]:
    """Fields of the chat that a request becomes -> the client's."""
    config = body.output_config
    own = "output_config.format" if config is not None and config.format is not None else None
    if own is not None and body.tool_choice is not None and body.tool_choice.type in _FORCED:
        own = "tools"
    return {**SPELLING, **spelling_of(constrained_by(body, own) or "tools")}


Note = Callable[[str], None]


def chat_request(body: CountTokensRequest, note: Note) -> ChatRequest:
    """The request as a chat.

    Args:
        note: is told of what is left out.

    Raises:
        RequestError, RequestValidationError: naming the field.
    """
    values: dict[str, Any] = {"messages": chat_messages(body, note)}
    kwargs: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
        kwargs = {"enable_thinking": thinks, "thinking": thinks}  # the two names that templates use
    values["include_reasoning"] = shows_thinking(body)
    if body.messages[-1].role == "assistant" and _is_begun(values["messages"], len(body.messages)):
        values.update(continue_final_message=True, add_generation_prompt=False)
    paths = _add_tools(values, body, note)
    given = _COPIED & body.model_fields_set & type(body).model_fields.keys()
    values.update({name: getattr(body, name) for name in given})
    if isinstance(body, MessagesRequest):
        _add_limits(values, body)
    kwargs.update(body.chat_template_kwargs or {})
    if kwargs:
        values["chat_template_kwargs"] = kwargs
    if body.output_config is not None:
        if body.output_config.format is not None and isinstance(body, MessagesRequest):
            check_one_form(body, "output_config.format")
        _add_output(values, body.output_config.effort, body.output_config.format)
    chat = as_chat(values, SPELLING)
    chat.name_tools(paths, _sent(body.tool_choice))
    return chat


def _is_begun(messages: list[dict[str, Any]], count: int) -> bool:
    """True if the last message, the assistant's, begins an answer that the model is to continue. An empty
    one begins nothing, and is dropped.

    Args:
        messages: of the chat.
        count: number of the client's messages.

    Raises:
        RequestError: it has no text, but thoughts or calls; or there is nothing but it.
    """
    last, where = messages[-1], f"messages[{count - 1}].content"
    if (last["content"] or "").strip():
        return True
    if last.keys() > {"role", "content"}:
        raise RequestError(
            f"{where}: an assistant's message at the end is continued, so it must end with a text; a call "
            "must be followed by its result",
            param="messages",
        )
    if len(messages) == 1:
        raise RequestError(f"{where}: must not be empty in the only message", param="messages")
    messages.pop()
    return False


def shows_thinking(body: CountTokensRequest) -> bool:
    """True if thoughts are returned: only if they were asked for, as Anthropic's clients expect."""
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _add_limits(values: dict[str, Any], body: MessagesRequest) -> None:
    values["max_completion_tokens"] = body.max_tokens
    if body.stop_sequences:
        values["stop"] = body.stop_sequences
    budget = body.thinking.budget_tokens if body.thinking is not None else None
    if budget is not None and not _LEAST_BUDGET <= budget < body.max_tokens:
        raise RequestError(
            f"thinking.budget_tokens = {budget}: must be at least {_LEAST_BUDGET} and less than "
            f"max_tokens ({body.max_tokens})",
            param="thinking.budget_tokens",
        )


def _add_output(values: dict[str, Any], effort: str | None, form: dict[str, Any] | None) -> None:
    if effort is not None:
        values["reasoning_effort"] = effort
    if form is None:
        return
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RequestError(
            "output_config.format: must be {'type': 'json_schema', 'schema': {...}}",
            param="output_config.format",
        )
    check_size("output_config.format", form)
    schema = {"name": "output", "schema": form["schema"]}
    values["response_format"] = {"type": "json_schema", "json_schema": schema}


# Tools


def _add_tools(values: dict[str, Any], body: CountTokensRequest, note: Note) -> list[str]:
    """Adds tools and choice; returns where the tools' schemas are in the request."""
    check_size("tools", list(body.tools))
    kept = without_foreign(body.tools, note, own=("custom",))
    tools = [_tool(f"tools[{i}]", tool) for i, tool in kept]
    paths = [f"tools[{i}].input_schema" for i, _ in kept]
    if tools:
        values["tools"] = tools
    choice = body.tool_choice
    if choice is None or (not tools and choice.type == "auto"):
        return paths
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice: type 'tool' needs a name", param="tool_choice")
    if not tools and choice.type != "none":
        sent = choice.model_dump(exclude_unset=True)
        raise RequestError(f"tool_choice = {shown(sent)}: needs tools", param="tool_choice")
    if choice.disable_parallel_tool_use:
        values["parallel_tool_calls"] = False
    match choice.type:
        case "tool":
            values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case "any":
            values["tool_choice"] = "required"
        case other:
            values["tool_choice"] = other
    return paths


def _sent(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """A choice as errors show it: its type, unless it says more."""
    if choice is None or choice.name is None:
        return None if choice is None else choice.type
    return choice.model_dump(exclude_unset=True)


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedFeature(
            f"{where}: tools of type {str(kind)[:64]!r} are not known; functions have the type "
            "'custom', or none",
            param=f"{where}.type",
        )
    name, schema = check_name(f"{where}.name", tool.get("name")), tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(
            f"{where}.input_schema: must be an object", param=f"{where}.input_schema"
        )
    about = tool.get("description")
    if about is not None and not isinstance(about, str):
        raise RequestError(f"{where}.description: must be a string", param=f"{where}.description")
    parameters = schema if "type" in schema else {"type": "object", **schema}
    return function_tool(name, about, parameters, tool.get("strict"))


# Messages


def chat_messages(body: CountTokensRequest, note: Note) -> list[dict[str, Any]]:
    """The messages of a chat, the system prompt first.

    Args:
        note: is told of what is left out.

    Raises:
        RequestError: naming the message and block.
    """
    result: list[dict[str, Any]] = []
    if body.system:
        result.append({"role": "system", "content": _text_of("system", body.system)})
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            result.append(_assistant(where, message, names, note))
        elif message.role == "system":
            result.append({"role": "system", "content": _text_of(where, message.content)})
        else:
            result += _user(where, message, names)
    return result


_LEFT_OUT = frozenset(
    {"redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
     "code_execution_tool_result", "bash_code_execution_tool_result", "tool_search_tool_result",
     "text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result"}
)  # fmt: skip
"""Blocks of answers that another server gave: nobody can read them here, or they ran there."""


def _assistant(
    where: str, message: InputMessage, names: dict[str, str], note: Note
) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.content):
        place = f"{where}[{index}]"
        match block.type:
            case "text":
                texts.append(_required(place, "text", block.text))
            case "thinking":
                thoughts.append(_required(place, "thinking", block.thinking))
            case "tool_use":
                calls.append(_call(place, block, names))
            case kind if kind in _LEFT_OUT:
                note(f"blocks of type {kind}")
            case _:
                raise _refusal(place, block.type, "text, thinking and tool_use")
    made: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        made["reasoning"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
        made["content"] = made["content"] or None
    return made


def _call(where: str, block: ContentBlock, names: dict[str, str]) -> dict[str, Any]:
    call_id, name = _required(where, "id", block.id), _required(where, "name", block.name)
    if block.input is None:
        raise RequestError(f"{where}.input: must be an object", param="messages")
    names[call_id] = name
    if isinstance(block.input, str):  # as it was cut
        arguments = block.input
    else:
        check_size(f"{where}.input", block.input)
        arguments = msgspec.json.encode(block.input).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(where: str, message: InputMessage, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Results of tools as messages of their own; texts between them stay together."""
    if isinstance(message.content, str):
        return [{"role": "user", "content": message.content}]
    made: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        place = f"{where}[{index}]"
        if block.type == "tool_result":
            made.append(_result(place, block, names))
        elif block.type in ("text", "image"):
            part: dict[str, Any] = (
                {"type": "text", "text": _required(place, "text", block.text)}
                if block.type == "text"
                else _image(place, block.source)
            )
            if made and made[-1]["role"] == "user":
                made[-1]["content"].append(part)
            else:
                made.append({"role": "user", "content": [part]})
        else:
            raise _refusal(place, block.type, "text, image and tool_result")
    return [_simple(message) for message in made] or [{"role": "user", "content": ""}]


def _simple(message: dict[str, Any]) -> dict[str, Any]:
    """One text as a string."""
    content = message["content"]
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return {**message, "content": content[0]["text"]}
    return message


def _image(where: str, source: object) -> dict[str, Any]:
    """A picture as a part of a chat's message."""
    given = source if isinstance(source, Mapping) else {}
    match given.get("type"):
        case "base64":
            kind, data = given.get("media_type"), given.get("data")
            if not isinstance(kind, str) or not isinstance(data, str):
                raise RequestError(
                    f"{where}.source: must have media_type and data, both text", param="messages"
                )
            _check_media_type(where, kind, data)
            url, place = f"data:{kind};base64,{data}", f"{where}.source.data"
        case "url":
            place = f"{where}.source.url"
            if not isinstance(given.get("url"), str):
                raise RequestError(f"{place}: must be text", param="messages")
            url = given["url"]
        case other:
            raise UnsupportedFeature(
                f"{where}.source: type = {str(other)[:64]!r}: must be base64 or url",
                param="messages",
            )
    return {"type": "image_url", "image_url": url, CLIENT_PLACE: place}


def _check_media_type(where: str, kind: str, data: str) -> None:
    """Raises: RequestError: the type is none of images, or the content begins as one of another does."""
    place = f"{where}.source.media_type"
    if kind not in _BEGINS:
        raise RequestError(
            f"{place} = {kind[:64]!r}: must be one of {', '.join(_BEGINS)}", param="messages"
        )
    found = next((own for own, begin in _BEGINS.items() if re.match(begin, data)), kind)
    if found != kind:
        raise RequestError(f"{place} = {kind!r}: the data are {found}", param="messages")


def _result(where: str, block: ContentBlock, names: Mapping[str, str]) -> dict[str, Any]:
    call_id = _required(where, "tool_use_id", block.tool_use_id)
    name = names.get(call_id)
    if name is None:
        raise RequestError(
            f"{where}.tool_use_id = {call_id[:64]!r}: no tool_use of that id comes before",
            param="messages",
        )
    parts = _result_parts(where, block.content)
    if block.is_error:  # no template has a place for it
        first = parts.pop(0)["text"] if parts and parts[0]["type"] == "text" else ""
        parts.insert(0, {"type": "text", "text": "Error: " + first})
    message = {"role": "tool", "tool_call_id": call_id, "name": name, "content": parts}
    return _simple(message) if parts else {**message, "content": ""}


def _result_parts(
    where: str, content: str | Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Texts and pictures that a tool gave."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    parts = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        match part.get("type"):
            case "text":
                text = part.get("text")
                if not isinstance(text, str):
                    raise RequestError(f"{place}.text: must be a string", param="messages")
                parts.append({"type": "text", "text": text})
            case "image":
                parts.append(_image(place, part.get("source")))
            case kind:
                raise _refusal(place, kind, "text and image")
    return parts


def _text_of(where: str, content: str | Sequence[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _refusal(f"{where}[{index}]", block.type, "text")
        texts.append(_required(f"{where}[{index}]", "text", block.text))
    return "\n\n".join(texts)


def _required(where: str, name: str, value: str | None) -> str:
    if value is None:
        raise RequestError(f"{where}.{name}: must be a string", param="messages")
    return value


def _refusal(where: str, kind: Any, accepted: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{where}: blocks of type {str(kind)[:64]!r} are not supported here; accepted are blocks of type "
        f"{accepted}",
        param="messages",
    )
