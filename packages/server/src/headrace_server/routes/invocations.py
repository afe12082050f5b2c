"""``POST /invocations``: one path for every kind of request, told apart by their shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_core.errors import RequestError
from headrace_server.http.routing import ERROR_RESPONSES, JsonRoute

SHAPES = (
    ("/v1/chat/completions", ("messages",)),
    ("/v1/completions", ("prompt",)),
    ("/v1/embeddings", ("input",)),
    ("/v2/embed", ("texts",)),
    ("/classify", ("input",)),
    ("/pooling", ("input",)),
    ("/v1/embeddings", ("messages",)),
    ("/classify", ("messages",)),
    ("/pooling", ("messages",)),
    ("/pooling", ("data",)),
    ("/score", ("text_1", "text_2")),
    ("/score", ("queries", "documents")),
    ("/rerank", ("query", "documents")),
)
"""Route, and fields that its body must have; the first one that is served takes the request."""


def build(served: Callable[[], set[str]], app: ASGIApp) -> APIRouter:
    """The route.

    Args:
        served: paths that this application serves.
        app: gets the request under the other path; inside all middleware.
    """
    router = APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES, tags=["invocations"])

    @router.post("/invocations", response_model=None)
    async def invocations(request: Request) -> Response:
        """A chat, completion or whatever else the model serves; see its own route for fields."""
        body = await request.json()
        return _Forward(app, path_for(body, served()), await request.body())

    return router


def path_for(body: Any, served: set[str]) -> str:
    """The route that takes a body of this shape; if none is served, one that says why not.

    Raises:
        RequestError: not an object, or of no shape that is known.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    fitting = [path for path, fields in SHAPES if all(field in body for field in fields)]
    if fitting:
        return next((path for path in fitting if path in served), fitting[0])
    known = "; ".join(f"{' and '.join(fields)} ({path})" for path, fields in SHAPES)
    raise RequestError(f"the body matches no kind of request; known bodies have {known}")


class _Forward(Response):
    """The request once more, under another path."""

    def __init__(self, app: ASGIApp, path: str, body: bytes) -> None:
        super().__init__()
        self._to = app
        self._path = path
        self._whole_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": self._whole_body, "more_body": False}

        path = scope.get("root_path", "") + self._path
        inner = {**scope, "path": path, "raw_path": path.encode()}
        for name in ("route", "endpoint", "path_params", "router"):
            inner.pop(name, None)
        await self._to(inner, replay, send)
