"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_server.chat import Chat
from headrace_server.completions import Completion
from headrace_server.protocol.chat import ChatRequest, ChatResponse
from headrace_server.protocol.completions import CompletionRequest, CompletionResponse
from headrace_server.routing import STREAM_RESPONSE, json_router
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of
from headrace_server.stream import start_stream, wait_watching


class OpenAIRouter:
    """Text generation as OpenAI's clients speak it."""

    name = "openai"
    tasks: Sequence[str] = ("generate",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post(
            "/v1/completions", response_model=CompletionResponse, responses=STREAM_RESPONSE
        )
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await _serve(Completion(body, request, state_of(request)), request)

        if engine.model.has_chat_template or settings.chat_template is not None:

            @router.post(
                "/v1/chat/completions", response_model=ChatResponse, responses=STREAM_RESPONSE
            )
            async def chat(body: ChatRequest, request: Request) -> Response:
                return await _serve(Chat(body, request, state_of(request)), request)

        return router


async def _serve(answer: Completion | Chat, request: Request) -> Response:
    try:
        if answer.body.stream:
            return await start_stream(answer.events(), request, answer.state, answer.id)
        work = answer.whole()
        result = await wait_watching(work, request, answer.state.lifecycle, answer.id)
    except RequestError as error:
        error.param = answer.spelling.get(error.param or "", error.param)
        raise
    return Response(result.model_dump_json(), media_type="application/json")


ROUTER = OpenAIRouter()
