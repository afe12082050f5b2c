"""The route class of JSON routes, and what their handlers share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_core.errors import RequestError
from headrace_server.errors import BodyRefused, ErrorResponse
from headrace_server.offload import pieces
from headrace_server.state import ServerState
from headrace_server.stream import Events, start_stream, wait_watching

MAX_VALUES = 1_000_000
"""Arrays and objects of one body (brackets in texts count too). No request needs as many, and one of
64 MB may hold twenty million, for which decoding stops every thread for seconds."""

_SCANNED = 1 << 13
"""Bytes that are looked through, for one unit of cost (:mod:`headrace_server.offload`)."""
_SLICE = 1 << 20
"""Bytes that are looked through in one call."""

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is wrong."},
    404: {"model": ErrorResponse, "description": "The model is not served."},
    429: {"model": ErrorResponse, "description": "The queue is full; see Retry-After."},
    500: {"model": ErrorResponse, "description": "The engine failed."},
    503: {"model": ErrorResponse, "description": "The server is shutting down."},
}
STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream, server-sent events that end with [DONE].",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class JsonRequest(Request):
    """Decodes its body with msgspec: strict JSON (no NaN), no deep recursion."""

    async def json(self) -> Any:
        body = await self.body()
        off_loop = self.app.state.headrace.off_loop
        if len(body) > MAX_VALUES and await off_loop(len(body) // _SCANNED, has_many_values, body):
            raise BodyRefused("HR-REQ-006", f"the body has more than {MAX_VALUES} opening brackets")
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyRefused("HR-REQ-006", "the body is not valid JSON") from error


class JsonRoute(APIRoute):
    """A route whose body must be declared as ``application/json``; checked before parsing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method == "POST":
                declared = request.headers.get("content-type", "").partition(";")[0]
                if declared.strip().lower() != "application/json":
                    raise BodyRefused(
                        "HR-REQ-007", "Content-Type must be application/json; nothing else is read"
                    )
            return await handle(JsonRequest(request.scope, request.receive))

        return checked


def has_many_values(body: bytes) -> bool:
    """Whether it has more opening brackets than :data:`MAX_VALUES`. In slices, as each call keeps other
    threads waiting."""
    found = 0
    for at in range(0, len(body), _SLICE):
        found += body.count(b"[", at, at + _SLICE) + body.count(b"{", at, at + _SLICE)
        if found > MAX_VALUES:
            return True
    return False


def json_router() -> APIRouter:
    """A router whose POST routes take JSON only."""
    return APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


class Streaming(Protocol):
    """A body that says whether its answer is a stream."""

    stream: bool


class Call(Protocol):
    """One request of a route that answers whole or as a stream."""

    id: str
    state: ServerState
    spelling: Mapping[str, str]
    """The engine's names of fields -> the client's."""

    @property
    def body(self) -> Streaming: ...
    async def whole(self) -> BaseModel:
        """The answer in one piece."""
        ...

    def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        ...


async def answer_with(call: Call, request: Request) -> Response:
    """Run a call and answer as its body asks; a client that leaves ends it.

    Raises:
        RequestError: with ``param`` as the client spells it.
    """
    try:
        if call.body.stream:
            return await start_stream(call.events(), request, call.state, call.id)
        result = await wait_watching(call.whole(), request, call.state.lifecycle, call.id)
    except RequestError as error:
        error.param = call.spelling.get(error.param or "", error.param)
        raise
    return JsonAnswer(encode_answer(result))


class JsonAnswer(Response):
    """JSON that may be megabytes: sent in pieces, as fast as they are read."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        for piece in pieces(bytes(self.body)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encode_answer(answer: BaseModel) -> bytes:
    """A whole answer as JSON.

    Blocks of log-probabilities are msgspec structs in the place of the models that describe them,
    or encoded already: there may be hundreds of thousands of entries, for which models would take
    seconds. So this is quick, whatever the size.
    """
    return msgspec.json.encode(answer.model_dump(by_alias=True, warnings=False))
