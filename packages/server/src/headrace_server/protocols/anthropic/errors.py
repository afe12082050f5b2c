"""Errors in Anthropic's form, wherever on the way to its routes they arise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.errors import PromptTooLong
from headrace_server.errors.mapping import ErrorAnswer, report
from headrace_server.errors.rewriting import ErrorRewriter, message_of
from headrace_server.http.paths import route_path
from headrace_server.streaming.event_stream import named_event

PATH = "/v1/messages"
TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """The body of an error answer."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def answer(error: Exception, request_id: str) -> ErrorAnswer:
    """:func:`headrace_server.errors.mapping.report`, in the words by which this protocol's clients know that
    a conversation must be shortened."""
    reply = report(error, request_id)
    if not isinstance(error, PromptTooLong):
        return reply
    count = f"{'at least ' if error.at_least else ''}{error.num_prompt_tokens} tokens"
    most = error.limit - error.num_output_tokens
    return msgspec.structs.replace(
        reply, message=f"prompt is too long: {count} > {most} maximum. {reply.message}"
    )


def error_event(error: Exception, request_id: str) -> bytes:
    """An error in the middle of a stream: its last event."""
    reply = answer(error, request_id)
    return named_event("error", error_body(reply.status, reply.message))


def is_ours(path: str) -> bool:
    """True if a path belongs to this protocol."""
    return path == PATH or path.startswith(PATH + "/")


class AnthropicErrors:
    """ASGI middleware: rewrites the error bodies of everything further in, on this protocol's paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_ours(route_path(scope)):
            await self._app(scope, receive, send)
            return
        await self._app(
            scope,
            receive,
            ErrorRewriter(send, lambda status, reply: error_body(status, message_of(reply))),
        )
