"""``POST /v1/completions`` and ``POST /v1/chat/completions``, one conversation or many."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from headrace_core.engine import EngineClient
from headrace_server.batch_chat import BatchChat
from headrace_server.chat import Chat
from headrace_server.completions import Completion
from headrace_server.conversation import can_chat
from headrace_server.offload import text_cost
from headrace_server.protocol.batch_chat import BatchChatRequest, BatchChatResponse
from headrace_server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from headrace_server.protocol.completions import (
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
)
from headrace_server.routes.render import add_routes as add_render_routes
from headrace_server.routing import (
    JsonAnswer,
    answer_with,
    encode_answer,
    json_router,
    streamed,
)
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of
from headrace_server.stream import wait_watching


class OpenAIRouter:
    """Text generation as OpenAI's clients speak it."""

    name = "openai"
    tasks: Sequence[str] = ("generate",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post(
            "/v1/completions",
            response_model=CompletionResponse,
            responses=streamed(CompletionChunk),
        )
        async def completions(body: CompletionRequest, request: Request) -> Response:
            state, embeds = state_of(request), body.prompt_embeds or ""
            cost = text_cost(*([embeds] if isinstance(embeds, str) else embeds))
            call = await state.off_loop(cost, Completion, body, request, state)
            return await answer_with(call, request)

        if can_chat(engine.model, settings):

            @router.post(
                "/v1/chat/completions",
                response_model=ChatResponse,
                responses=streamed(ChatChunk),
            )
            async def chat(body: ChatRequest, request: Request) -> Response:
                return await answer_with(Chat(body, request, state_of(request)), request)

            @router.post("/v1/chat/completions/batch", response_model=BatchChatResponse)
            async def batch(body: BatchChatRequest, request: Request) -> Response:
                call = BatchChat(body, request, state_of(request))
                lifecycle = call.state.lifecycle
                answer = await wait_watching(call.whole(), request, lifecycle, call.id)
                return JsonAnswer(encode_answer(answer))

        add_render_routes(router, chats=can_chat(engine.model, settings))
        return router


ROUTER = OpenAIRouter()
