"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_server.chat.prompts import can_chat, count_tokens, turn_prompt
from headrace_server.http.routing import JsonAnswer, JsonRoute, naming_form, respell, streamed
from headrace_server.protocols.anthropic.answer import MessageAnswer
from headrace_server.protocols.anthropic.context import apply_edits
from headrace_server.protocols.anthropic.convert import SPELLING, chat_request, spelling_in
from headrace_server.protocols.anthropic.errors import answer, error_event
from headrace_server.protocols.anthropic.events import PING
from headrace_server.protocols.anthropic.protocol import (
    AnthropicError,
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from headrace_server.requests import convert
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for
from headrace_server.streaming.event_stream import StreamForm, start_stream, wait_watching

_FORM = StreamForm(done=b"", error=error_event, keep_alive=PING)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicError} for status in (400, 401, 404, 413, 429, 500, 503)
}
_STREAMED = streamed(MessageEvent, "The message; with stream, server-sent events.")


class AnthropicRouter:
    """Text generation as Anthropic's clients speak it."""

    name = "anthropic"
    tasks: Sequence[str] = ("generate",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = APIRouter(route_class=_Route, responses=_ERRORS)
        if can_chat(engine.model, settings):
            _add(router)
        return router


def _add(router: APIRouter) -> None:
    @router.post("/v1/messages", response_model=Message, responses=_STREAMED)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        state = await state_for(request, body.model)
        try:
            message = MessageAnswer(body, request, state)
            if body.stream:
                form = naming_form(_FORM, lambda error: _respell(error, body, spelling_in(body)))
                return await start_stream(message.events(), request, state, message.id, form)
            result = await wait_watching(message.whole(), request, state.lifecycle, message.id)
        except RequestError as error:
            _respell(error, body, spelling_in(body))
            raise
        return JsonAnswer(msgspec.json.encode(result))

    @router.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count(body: CountTokensRequest, request: Request) -> Response:
        state = await state_for(request, body.model)
        convert.check_model(body.model, state.engine.model)
        body.check_fields(state)
        name = request.scope["headrace_request_id"]
        try:
            apply_edits(body, state.engine.model.max_model_len)
            prompt = turn_prompt(chat_request(body, state.left_out.note), state)
            work = count_tokens(state, prompt)
            count = await wait_watching(work, request, state.lifecycle, name)
        except RequestError as error:
            _respell(error, body, SPELLING)
            raise
        return Response(msgspec.json.encode({"input_tokens": count}), media_type="application/json")


def _respell(error: RequestError, body: CountTokensRequest, spelling: Mapping[str, str]) -> None:
    """Name the field as the client spells it, unless it is a field of the client's own already."""
    if error.param not in (body.model_extra or {}):
        respell(error, spelling)


class _Route(JsonRoute):
    """Answers errors here: past the router, the unexpected ones would miss their rewriting."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except HTTPException:
                raise
            except Exception as error:
                return answer(error, request.scope.get("headrace_request_id", "")).response()

        return answered


ROUTER = AnthropicRouter()
