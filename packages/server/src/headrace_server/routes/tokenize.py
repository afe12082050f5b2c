"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request

from headrace_core.engine import EngineClient
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import Prompt
from headrace_server.conversation import can_chat, special_tokens, spelled
from headrace_server.convert import chat_prompt, check_model
from headrace_server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace_server.routing import json_router
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of
from headrace_server.stream import wait_watching


class TokenizeRouter:
    """Texts and conversations to token ids and back."""

    name = "tokenize"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = json_router()
        router.tags.append("tokenize")

        @router.post("/tokenize")
        async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
            state = state_of(request)
            check_model(body.model, engine.model)
            body.check_fields(state)
            _need_tokenizer(engine)
            prompt: Prompt
            special: bool | None = body.add_special_tokens
            if isinstance(body, TokenizeChatRequest):
                _need_template(engine, settings, body.chat_template)
                chat = chat_prompt(body, state)
                prompt = spelled(chat, state)
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
            return TokenizeResponse(
                count=len(result.token_ids),
                max_model_len=engine.model.max_model_len,
                tokens=result.token_ids,
                token_strs=result.token_strings,
            )

        @router.post("/detokenize")
        async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
            check_model(body.model, engine.model)
            body.check_fields(state_of(request))
            _need_tokenizer(engine)
            size = engine.model.vocab_size
            if any(token >= size for token in body.tokens):
                raise RequestError(f"tokens: must be ids below {size}", param="tokens")
            return DetokenizeResponse(prompt=await engine.detokenize(body.tokens))

        if settings.enable_tokenizer_info_endpoint:

            @router.get("/tokenizer_info")
            async def tokenizer_info() -> Mapping[str, Any]:
                return engine.model.tokenizer_info

        return router


def _need_tokenizer(engine: EngineClient) -> None:
    if not engine.model.has_tokenizer:
        raise UnsupportedFeature("this server runs without a tokenizer (--skip-tokenizer-init)")


def _need_template(engine: EngineClient, settings: ServerSettings, template: str | None) -> None:
    if not can_chat(engine.model, settings) and template is None:
        raise UnsupportedFeature(
            "messages: the model has no chat template; start the server with --chat-template",
            param="messages",
        )


ROUTER = TokenizeRouter()
