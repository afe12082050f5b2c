"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from headrace_core.engine import EngineClient, TokenizedPrompt
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import Prompt
from headrace_server.chat.prompts import engine_prompt, need_template, special_tokens
from headrace_server.http.routing import JsonAnswer, json_router
from headrace_server.protocols.openai.bodies.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace_server.requests.convert import chat_prompt, check_model
from headrace_server.routes.named import check_named
from headrace_server.settings import ServerSettings
from headrace_server.state import state_for
from headrace_server.streaming.event_stream import wait_watching
from headrace_server.streaming.offload import encoded

_TOKENS = 16
"""Tokens of an answer for one unit of cost."""
_SLICE = 4096
"""Tokens that are encoded in one call."""


class TokenizeRouter:
    """Texts and conversations to token ids and back."""

    name = "tokenize"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()
        router.tags.append("tokenize")

        @router.post("/tokenize", response_model=TokenizeResponse)
        async def tokenize(body: TokenizeRequest, request: Request) -> Response:
            state = await state_for(request, body.model)
            check_model(body.model, state.engine.model)
            body.check_fields(state)
            _need_tokenizer(engine)
            prompt: Prompt
            special: bool | None = body.add_special_tokens
            if isinstance(body, TokenizeChatRequest):
                need_template(engine.model, settings, body.chat_template)
                chat = chat_prompt(body, state)
                prompt = engine_prompt(chat, state)
                special = special_tokens(prompt) if prompt is not chat else special
            else:
                prompt = body.prompt
            work = engine.tokenize(
                prompt,
                add_special_tokens=special,
                strings=bool(body.return_token_strs),
            )
            name = request.scope["headrace_request_id"]
            result = await wait_watching(work, request, state.lifecycle, name)
            cost = len(result.token_ids) // _TOKENS
            data = await state.off_loop(cost, _answer, result, engine.model.max_model_len)
            return JsonAnswer(data)

        @router.post("/detokenize")
        async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
            state = await state_for(request, body.model)
            check_model(body.model, state.engine.model)
            body.check_fields(state)
            _need_tokenizer(engine)
            size = engine.model.vocab_size
            if body.tokens and max(body.tokens) >= size:
                raise RequestError(f"tokens: must be ids below {size}", param="tokens")
            return DetokenizeResponse(prompt=await engine.detokenize(body.tokens))

        if settings.enable_tokenizer_info_endpoint:

            @router.get("/tokenizer_info", dependencies=[Depends(check_named)])
            async def tokenizer_info() -> Mapping[str, Any]:
                return engine.model.tokenizer_info

        return router


def _answer(result: TokenizedPrompt, max_model_len: int) -> bytes:
    strings = result.token_strings
    return msgspec.json.encode(
        {
            "count": len(result.token_ids),
            "max_model_len": max_model_len,
            "tokens": encoded(result.token_ids, _SLICE),
            "token_strs": None if strings is None else encoded(strings, _SLICE),
        }
    )


def _need_tokenizer(engine: EngineClient) -> None:
    if not engine.model.has_tokenizer:
        raise UnsupportedFeature("this server runs without a tokenizer (--skip-tokenizer-init)")


ROUTER = TokenizeRouter()
