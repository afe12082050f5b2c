"""A request's checks, and its settings in the chat's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.http.routing import respell
from headrace_server.protocols.base import check_size
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.bodies.sampling import CHAT_EXTENSIONS
from headrace_server.protocols.responses.protocol import INCLUDABLE, LOGPROBS, ResponsesRequest
from headrace_server.protocols.responses.toolset import ToolSet
from headrace_server.requests.constraints import check_one_form, constrained_by, spelling_of
from headrace_server.requests.convert import as_chat

SPELLING: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields of a chat -> the client's."""
_COPIED = (
    *CHAT_EXTENSIONS,
    "temperature", "top_p", "stop", "parallel_tool_calls", "stream", "thinking_token_budget",
    "return_tokens_as_token_ids",
)  # fmt: skip


def spelling_in(body: ResponsesRequest, constraint: str = "") -> Mapping[str, str]:
    """Fields of the chat that a request becomes -> the client's.

    Args:
        constraint: the chat's field that the constraint of the turn came from; "": the first turn's.
    """
    form = body.text.format if body.text is not None else None
    own = "text.format" if form is not None and form.get("type") != "text" else None
    if own is not None and _must_call(body.tool_choice):
        own = "tools"
    field = SPELLING.get(constraint, constraint) or constrained_by(body, own) or "tools"
    return {**SPELLING, **spelling_of(field)}


def _must_call(choice: str | Mapping[str, Any]) -> bool:
    """True if a ``tool_choice`` leaves no answer but calls."""
    if isinstance(choice, str):
        return choice == "required"
    return choice.get("type") == "function" or choice.get("mode") == "required"


def name_fields(error: RequestError, body: ResponsesRequest, constraint: str = "") -> None:
    """Name the client's fields in an error, unless it names one of the client's own already.

    Args:
        constraint: as for :func:`spelling_in`.
    """
    if error.param not in (body.model_extra or {}):
        respell(error, spelling_in(body, constraint))


def check(body: ResponsesRequest, *, stores: bool) -> None:
    """Refuse what this server does not do.

    Args:
        stores: responses are kept.

    Raises:
        RequestError: naming the field.
    """
    unknown = sorted(set(body.include) - set(INCLUDABLE))
    if unknown:
        raise RequestError(
            f"include: {unknown[0][:64]!r} must be one of {', '.join(INCLUDABLE)}", param="include"
        )
    if body.top_logprobs and LOGPROBS not in body.include:
        raise RequestError(
            f"top_logprobs = {body.top_logprobs}: needs include = [{LOGPROBS!r}]",
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only allowed with stream", param="stream_options")
    _check_store(body, stores)


def _check_store(body: ResponsesRequest, stores: bool) -> None:
    how = "responses are not kept here (--enable-responses-store is off)"
    if body.background and not stores:
        raise UnsupportedFeature(f"background: {how}", param="background")
    if body.background and not body.store:
        raise RequestError("background: needs store = true", param="background")
    previous = body.previous_response_id
    if previous is None:
        return
    if not previous.startswith("resp_"):
        raise RequestError(
            f"previous_response_id = {previous[:64]!r}: must begin with 'resp_'",
            param="previous_response_id",
        )
    if not stores:
        raise UnsupportedFeature(f"previous_response_id: {how}", param="previous_response_id")


def chat_request(
    body: ResponsesRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: ToolSet,
    max_tokens: int | None,
) -> ChatRequest:
    """The request as a chat.

    Raises:
        RequestError, RequestValidationError: naming the field.
    """
    values: dict[str, Any] = {
        name: getattr(body, name) for name in _COPIED if name in body.model_fields_set
    }
    values["messages"] = messages
    values["max_completion_tokens"] = max_tokens
    if tools.functions:
        values["tools"] = tools.functions
    if tools.choice is not None:
        values["tool_choice"] = tools.choice
    if LOGPROBS in body.include:
        values.update(logprobs=True, top_logprobs=body.top_logprobs)
    if body.reasoning is not None and body.reasoning.effort is not None:
        values["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.verbosity is not None:
        values["verbosity"] = body.text.verbosity
    form = _response_format(body)
    if form is not None:
        check_one_form(body, "text.format")
        values["response_format"] = form
    chat = as_chat(values, SPELLING)
    if tools.functions:
        chat.name_tools(tools.paths, body.tool_choice)
    return chat


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """``text.format`` in the chat's form: a schema's fields are one level deeper there."""
    form = body.text.format if body.text is not None else None
    if form is None or form.get("type") == "text":
        return None
    check_size("text.format", form)
    match form.get("type"):
        case "json_object" if form.get("schema") is not None:
            return {"type": "json_object", "schema": form["schema"]}
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            inner = {
                key: form[key]
                for key in ("name", "schema", "strict", "description")
                if form.get(key) is not None
            }
            return {"type": "json_schema", "json_schema": inner}
        case other:
            raise RequestError(
                f"text.format.type = {str(other)[:64]!r}: must be text, json_object or json_schema",
                param="text.format.type",
            )
