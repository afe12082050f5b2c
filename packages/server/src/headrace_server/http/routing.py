"""The route class of JSON routes, and what their handlers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_core.errors import RequestError
from headrace_server.errors import json_faults
from headrace_server.errors.mapping import BodyRefused, ClientGone, ErrorResponse
from headrace_server.http.json_counts import JsonCounts, exceeds, nesting
from headrace_server.requests.constraints import in_client_words
from headrace_server.state import ServerState, serving_of
from headrace_server.streaming.event_stream import (
    OPENAI_FORM,
    Events,
    StreamForm,
    start_stream,
    wait_watching,
)
from headrace_server.streaming.obfuscation import obfuscated
from headrace_server.streaming.offload import pieces

MAX_NAMES = 1 << 17
"""Names in objects, and objects and lists, of one body: decoding and validating as many takes some 50 ms
each, and cannot be interrupted."""
MAX_ITEMS = 1 << 20
"""Values in the objects and lists of one body; more where the context holds more tokens."""
MAX_FIELDS = 1024
"""Fields of a body, unknown ones included."""

MAX_DEPTH = 512
"""Levels of objects and lists in one body, itself included. The decoder and what reads its result call
themselves for each; the interpreter allows about a thousand calls, less those under way."""

BOM = b"\xef\xbb\xbf"
"""Byte order mark in UTF-8. Editors on Windows write it at a file's beginning; RFC 8259, section 8.1, lets
parsers ignore it there."""

_READ = 1 << 8
"""Bytes of a body, for one unit of cost (:mod:`headrace_server.streaming.offload`): from 256 KiB on, bodies
are read in a thread."""

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is wrong."},
    404: {"model": ErrorResponse, "description": "The model is not served."},
    429: {"model": ErrorResponse, "description": "The queue is full; see Retry-After."},
    500: {"model": ErrorResponse, "description": "The engine failed."},
    503: {"model": ErrorResponse, "description": "The server is shutting down."},
}


def streamed(
    event: type,
    description: str = "The answer; with stream, server-sent events that end with [DONE].",
) -> dict[int | str, dict[str, Any]]:
    """The answers of a route besides the whole one, for the OpenAPI document.

    Args:
        event: the data of one event, of :data:`headrace_server.openapi.EVENTS`.
    """
    schema = {"$ref": f"#/components/schemas/{event.__name__}"}
    return {200: {"description": description, "content": {"text/event-stream": {"schema": schema}}}}


class JsonRequest(Request):
    """A request whose body is decoded by msgspec: strict JSON (no NaN), no deep recursion.

    Args:
        field: what the body must be; None: nobody has said.
    """

    def __init__(self, scope: Scope, receive: Receive, field: BodyField | None) -> None:
        super().__init__(scope, receive)
        self._field = field
        self._read: Any = None

    async def read(self) -> None:
        """Take the body in, decode and validate it; a large one beside the event loop.

        Raises:
            BodyRefused: it is not JSON, or holds too much.
            RequestValidationError: it is not what the route takes.
            ClientGone: the client left before its end.
        """
        try:
            body = await self.body()
        except ClientDisconnect as error:
            raise ClientGone from error
        if body:
            state = serving_of(self)
            context = state.engine.model.max_model_len if isinstance(state, ServerState) else 0
            most = JsonCounts(MAX_NAMES, max(MAX_ITEMS, 2 * context))
            self._read = await state.off_loop(len(body) // _READ, self._taken_in, body, most)

    async def json(self) -> Any:
        return self._read

    def _taken_in(self, body: bytes, most: JsonCounts) -> Any:
        body = body.removeprefix(BOM)
        if exceeds(body, most):
            raise BodyRefused(
                "HR-REQ-006",
                f"the body has more than {most.names} names, objects and lists, or more than "
                f"{most.items} values",
            )
        # Brackets in strings count here, so nearly all bodies pass without being looked at closely.
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and (depth := nesting(body)) > MAX_DEPTH:
            raise BodyRefused(
                "HR-REQ-006",
                f"the body is nested {depth} levels deep; it may have at most {MAX_DEPTH} levels of "
                "objects and lists",
            )
        try:
            data = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = json_faults.reason(body, error)
            raise BodyRefused("HR-REQ-006", f"the body is not valid JSON: {why}") from error
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise BodyRefused("HR-REQ-006", f"the body has more than {MAX_FIELDS} fields")
        if self._field is None:
            return data
        # Once more by the framework: what is an instance of its model already passes as it is.
        value, errors = self._field.validate(data, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=data)
        return value


class BodyField(Protocol):
    """The form of a route's body, as FastAPI keeps it."""

    def validate(
        self, value: Any, values: dict[str, Any], *, loc: tuple[int | str, ...]
    ) -> tuple[Any, Any]:
        """The value and no errors, or errors."""
        ...


class JsonRoute(APIRoute):
    """A route whose body must be declared as ``application/json``; checked before parsing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            declared = request.headers.get("content-type", "").partition(";")[0]
            if declared.strip().lower() != "application/json":
                raise BodyRefused(
                    "HR-REQ-007", "Content-Type must be application/json; nothing else is read"
                )
            read = JsonRequest(request.scope, request.receive, self.body_field)
            await read.read()
            return await handle(read)

        return checked


def json_router() -> APIRouter:
    """A router whose POST routes take JSON only."""
    return APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


class Streaming(Protocol):
    """A body that says whether its answer is a stream."""

    stream: bool


class RouteCall(Protocol):
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


async def answer_with(call: RouteCall, request: Request) -> Response:
    """Run a call and answer as its body asks; a client that leaves ends it.

    Raises:
        RequestError: with ``param`` as the client spells it.
    """
    try:
        if call.body.stream:
            form = naming_form(OPENAI_FORM, lambda error: respell(error, call.spelling))
            options = getattr(call.body, "stream_options", None)  # transcriptions have none
            pads = options is not None and bool(options.include_obfuscation)
            events = obfuscated(call.events()) if pads else call.events()
            return await start_stream(events, request, call.state, call.id, form)
        result = await wait_watching(call.whole(), request, call.state.lifecycle, call.id)
    except RequestError as error:
        respell(error, call.spelling)
        raise
    return JsonAnswer(encode_answer(result))


def naming_form(form: StreamForm, name_fields: Callable[[RequestError], None]) -> StreamForm:
    """A protocol's stream, in which errors that come late name the client's fields, too.

    Args:
        name_fields: puts the client's names into an error.
    """

    def told(error: Exception, request_id: str) -> bytes:
        if isinstance(error, RequestError):
            name_fields(error)
        return form.error(error, request_id)

    return dataclasses.replace(form, error=told)


def respell(error: RequestError, spelling: Mapping[str, str]) -> None:
    """Name the field as the client spells it: in ``param``, and where the message begins with it. Of a
    constraint beside the field, too, the client's name is told.

    Args:
        spelling: the engine's names of fields -> the client's.
    """
    ours = error.param or ""
    theirs = spelling.get(ours)
    if not ours.startswith("structured_outputs"):
        error.args = (in_client_words(str(error), spelling), *error.args[1:])
    if theirs is None:
        return
    error.param = theirs
    told = str(error)
    if told.startswith(ours) and told[len(ours) :].startswith((":", " = ", ".", "[")):
        error.args = (theirs + told[len(ours) :],)


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
