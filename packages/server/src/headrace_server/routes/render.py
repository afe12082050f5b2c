"""``POST /v1/chat/completions/render`` and ``POST /v1/completions/render``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from headrace_core.errors import RequestError
from headrace_server.protocol.chat import ChatRequest
from headrace_server.protocol.completions import CompletionRequest
from headrace_server.protocol.render import RenderedRequest
from headrace_server.rendering import Rendering
from headrace_server.routing import respell
from headrace_server.state import state_of
from headrace_server.stream import wait_watching


def add_routes(router: APIRouter, *, chats: bool) -> None:
    """Add the routes.

    Args:
        chats: whether conversations can be written.
    """

    @router.post("/v1/completions/render", response_model=list[RenderedRequest])
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """A request of /inference/v1/generate for each prompt."""
        return await _answer(body, request)

    if chats:

        @router.post("/v1/chat/completions/render", response_model=RenderedRequest)
        async def render_chat(body: ChatRequest, request: Request) -> Response:
            """The chat as a request of /inference/v1/generate."""
            return await _answer(body, request)


async def _answer(body: ChatRequest | CompletionRequest, request: Request) -> Response:
    call = Rendering(body, request, state_of(request))
    try:
        return await wait_watching(call.respond(), request, call.state.lifecycle, call.id)
    except RequestError as error:
        respell(error, call.spelling)
        raise
