"""Errors in Cohere's form: ``{"id", "message"}``, with our own error object beside them."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_server.errors.rewriting import ErrorRewriter, message_of
from headrace_server.http.paths import route_path

PATHS = "/v2/"
"""The beginning of Cohere's paths."""


class CohereErrors:
    """ASGI middleware: rewrites the error bodies of everything further in, on Cohere's paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not route_path(scope).startswith(PATHS):
            await self._app(scope, receive, send)
            return

        def rewrite(status: int, told: Any) -> dict[str, Any]:
            said = {"id": scope.get("headrace_request_id", ""), "message": message_of(told)}
            return {**told, **said} if isinstance(told, dict) else said

        await self._app(scope, receive, ErrorRewriter(send, rewrite))
