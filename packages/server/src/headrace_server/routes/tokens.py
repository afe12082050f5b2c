"""``POST /inference/v1/generate``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from headrace_core.engine import EngineClient
from headrace_server.http.routing import answer_with, json_router, streamed
from headrace_server.protocols.openai.bodies.generate import (
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
)
from headrace_server.protocols.openai.generate import TokenGeneration
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for


class TokensRouter:
    """Tokens in, tokens out."""

    name = "tokens"
    tasks: Sequence[str] = ("generate",)

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()

        @router.post(
            "/inference/v1/generate",
            response_model=GenerateResponse,
            responses=streamed(GenerateChunk),
        )
        async def generate(body: GenerateRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            return await answer_with(TokenGeneration(body, request, state), request)

        return router


ROUTER = TokensRouter()
