"""``/v1/responses``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.routing import APIRoute

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_server.chat.prompts import can_chat
from headrace_server.errors.mapping import report
from headrace_server.http.routing import JsonAnswer, json_router, streamed
from headrace_server.protocols.responses.protocol import (
    DeletedResponse,
    ItemList,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from headrace_server.protocols.responses.request import name_fields
from headrace_server.protocols.responses.service import ResponseService, UnknownResponse, owner_of
from headrace_server.protocols.responses.store import StoredResponse
from headrace_server.routes.named import check_named
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for, state_of
from headrace_server.streaming.event_stream import (
    DirectWriter,
    StreamForm,
    named_event,
    start_stream,
    wait_watching,
)
from headrace_server.streaming.obfuscation import obfuscated
from headrace_server.tools.base import ToolServer
from headrace_server.tools.load import load_tool_server

_STREAMED = streamed(
    ResponseEvent, "The response; with stream, server-sent events with rising numbers."
)
After = Annotated[int | None, Query(ge=0, lt=2**53)]
Limit = Annotated[int, Query(ge=1, le=100)]
Word = Annotated[str | None, Query(max_length=256)]


class ResponsesRouter:
    """OpenAI's Responses protocol."""

    name = "responses"
    tasks: Sequence[str] = ("generate",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()
        tool_server = load_tool_server(settings.tool_server)
        service = ResponseService(settings, tool_server)
        if can_chat(engine.model, settings):
            if tool_server is not None:
                router.lifespan_context = partial(_prepared, tool_server)
            _add_create(router, service)
            _add_stored(router, service)
        return router


@asynccontextmanager
async def _prepared(tool_server: ToolServer, app: Any) -> AsyncIterator[None]:
    """Tools are looked for while the server serves: some take a minute to start."""
    looking = asyncio.create_task(tool_server.prepare())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _add_create(router: APIRouter, service: ResponseService) -> None:
    @router.post("/v1/responses", response_model=ResponseObject, responses=_STREAMED)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        try:
            return await _create(body, request, service)
        except RequestError as error:
            name_fields(error, body)
            raise
        except UnknownResponse as error:
            return error.answer.response()


async def _create(body: ResponsesRequest, request: Request, service: ResponseService) -> Response:
    state = await state_for(request, body.model)
    name = request.scope["headrace_request_id"]
    work = service.begin(body, request, state)  # may ask tool servers, and tokenize
    started = await wait_watching(work, request, state.lifecycle, name)
    run, options = started.run, body.stream_options
    pads = options is not None and bool(options.include_obfuscation)
    if body.background:
        record = started.in_background(state)
        return await _replay(record, -1, request, pads) if body.stream else _json(run.response())
    if body.stream:
        form = StreamForm(done=b"", error=started.fail)
        events = obfuscated(started.events()) if pads else started.events()
        return await start_stream(events, request, state, run.id, form)
    result = await wait_watching(started.whole(), request, state.lifecycle, run.id)
    return _json(result)


def _add_stored(router: APIRouter, service: ResponseService) -> None:
    named = [Depends(check_named)]

    @router.get(
        "/v1/responses/{response_id}",
        response_model=ResponseObject,
        responses=_STREAMED,
        dependencies=named,
    )
    async def show(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: After = None,
        include_obfuscation: bool = False,
    ) -> Response:
        record = _find(service, response_id, request)
        if isinstance(record, Response):
            return record
        if not stream and starting_after is None:
            return _json(record.response)
        if not record.has_log:
            raise RequestError(
                "stream: this response was made without stream and not in the background; its "
                "events are not kept",
                param="stream",
            )
        after = -1 if starting_after is None else starting_after
        return await _replay(record, after, request, include_obfuscation)

    @router.delete(
        "/v1/responses/{response_id}", response_model=DeletedResponse, dependencies=named
    )
    async def delete(response_id: str, request: Request) -> Response:
        record = _find(service, response_id, request)
        if isinstance(record, Response):
            return record
        if record.running:
            await service.cancel(record)
        service.store.remove(record)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.get(
        "/v1/responses/{response_id}/input_items", response_model=ItemList, dependencies=named
    )
    async def input_items(
        response_id: str,
        request: Request,
        limit: Limit = 20,
        order: Word = "desc",
        after: Word = None,
    ) -> Response:
        record = _find(service, response_id, request)
        if isinstance(record, Response):
            return record
        return _json(_page(record.input_items, limit, order, after))

    async def cancel(response_id: str, request: Request) -> Response:
        record = _find(service, response_id, request)
        if isinstance(record, Response):
            return record
        await service.cancel(record)
        return _json(record.response)

    router.add_api_route(
        "/v1/responses/{response_id}/cancel",
        cancel,
        methods=["POST"],
        response_model=ResponseObject,
        dependencies=named,
        route_class_override=APIRoute,  # a POST without a body, so of no content type
    )


def _find(
    service: ResponseService, response_id: str, request: Request
) -> StoredResponse | Response:
    try:
        return service.find(owner_of(request), response_id)
    except UnknownResponse as error:
        return error.answer.response()


async def _replay(record: StoredResponse, after: int, request: Request, pads: bool) -> Response:
    """Stream kept events, and those that are still to come; ``pads``: obfuscated."""
    record.check_number(after)
    state = state_of(request)

    async def events() -> AsyncGenerator[bytes | DirectWriter, None]:
        async for data in record.follow(after):
            yield data

    name = request.scope["headrace_request_id"]
    sent = obfuscated(events()) if pads else events()
    return await start_stream(sent, request, state, name, StreamForm(b"", _error_event))


def _error_event(error: Exception, request_id: str) -> bytes:
    """An error of the reading, not of the response: the response goes on."""
    reply = report(error, request_id)
    body = {"type": "error", "code": str(reply.status), "message": reply.message, "param": None}
    return named_event("error", body)


def _page(
    items: list[dict[str, Any]], limit: int, order: str | None, after: str | None
) -> dict[str, Any]:
    if order not in ("asc", "desc"):
        raise RequestError(f"order = {str(order)[:32]!r}: must be asc or desc", param="order")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(f"after = {after[:64]!r}: no item of that id", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last,
            "has_more": len(ordered) > limit}  # fmt: skip


def _json(data: Any) -> Response:
    return JsonAnswer(msgspec.json.encode(data))


ROUTER = ResponsesRouter()
