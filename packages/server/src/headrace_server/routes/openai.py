"""``POST /v1/completions`` and ``POST /v1/chat/completions``, one conversation or many; what they would
ask of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError
from headrace_server.chat.prompts import can_chat
from headrace_server.http.routing import (
    JsonAnswer,
    answer_with,
    encode_answer,
    json_router,
    respell,
    streamed,
)
from headrace_server.protocols.openai.batch_chat import BatchChat
from headrace_server.protocols.openai.bodies.batch_chat import BatchChatRequest, BatchChatResponse
from headrace_server.protocols.openai.bodies.chat import ChatChunk, ChatRequest, ChatResponse
from headrace_server.protocols.openai.bodies.completions import (
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
)
from headrace_server.protocols.openai.chat import Chat
from headrace_server.protocols.openai.completions import Completion
from headrace_server.protocols.openai.render import RenderedRequest, Rendering
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for
from headrace_server.streaming.event_stream import wait_watching
from headrace_server.streaming.offload import text_cost


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
            state, embeds = await state_for(request, body.model), body.prompt_embeds or ""
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
                state = await state_for(request, body.model)
                return await answer_with(Chat(body, request, state), request)

            @router.post("/v1/chat/completions/batch", response_model=BatchChatResponse)
            async def batch(body: BatchChatRequest, request: Request) -> Response:
                call = BatchChat(body, request, await state_for(request, body.model))
                lifecycle = call.state.lifecycle
                answer = await wait_watching(call.whole(), request, lifecycle, call.id)
                return JsonAnswer(encode_answer(answer))

        _add_render_routes(router, chats=can_chat(engine.model, settings))
        return router


def _add_render_routes(router: APIRouter, *, chats: bool) -> None:
    """Add the routes that answer with requests as tokens.

    Args:
        chats: whether conversations can be written.
    """

    @router.post("/v1/completions/render", response_model=list[RenderedRequest])
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """A request of /inference/v1/generate for each prompt."""
        return await _render(body, request)

    if chats:

        @router.post("/v1/chat/completions/render", response_model=RenderedRequest)
        async def render_chat(body: ChatRequest, request: Request) -> Response:
            """The chat as a request of /inference/v1/generate."""
            return await _render(body, request)


async def _render(body: ChatRequest | CompletionRequest, request: Request) -> Response:
    call = Rendering(body, request, await state_for(request, body.model))
    try:
        return await wait_watching(call.respond(), request, call.state.lifecycle, call.id)
    except RequestError as error:
        respell(error, call.spelling)
        raise


ROUTER = OpenAIRouter()
