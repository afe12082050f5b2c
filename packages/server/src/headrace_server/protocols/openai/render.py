"""Chats and completions as requests of ``/inference/v1/generate``: template, tokens and parameters, and
nothing is generated.

For deployments that turn text into tokens on other machines than those that run the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.request import Prompt, brings_media
from headrace_core.sampling.params import SamplingParams
from headrace_server.chat.answer_plan import AnswerPlan
from headrace_server.chat.prompts import chat_prompt_of, engine_prompt, special_tokens
from headrace_server.http.routing import JsonAnswer
from headrace_server.protocols.base import FreeObject
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.bodies.completions import CompletionRequest
from headrace_server.protocols.openai.bodies.generate import TokenSampling
from headrace_server.protocols.openai.bodies.sampling import SamplingBody, StreamOptions
from headrace_server.requests import convert
from headrace_server.requests.bounded_gather import in_order
from headrace_server.requests.constraints import asked_of, spelling_of
from headrace_server.state import ServerState
from headrace_server.streaming.offload import encoded

_AT_ONCE = 64
"""Prompts that are tokenized side by side."""
_SLICE = 4096
"""Tokens that are encoded in one call."""
_TOKENS = 16
"""Tokens of an answer that count as one unit of cost."""
_ELSEWHERE = "which /inference/v1/generate does not take"


class RenderedRequest(BaseModel):
    """A request as ``POST /inference/v1/generate`` takes it."""

    request_id: str
    token_ids: list[int]
    sampling_params: FreeObject = Field(
        description="Parameters that differ from their defaults, including the model's own defaults."
    )
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0


class Rendering:
    """Checks a request when made; then :meth:`respond`, once.

    Raises:
        RequestError: naming the field; also for what tokens alone cannot say.
    """

    spelling: Mapping[str, str] = {"prompt_token_ids": "prompt"}

    def __init__(
        self, body: ChatRequest | CompletionRequest, request: Request, state: ServerState
    ) -> None:
        self.state, self._body = state, body
        model = state.engine.model
        convert.check_model(body.model, model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        self.id = convert.answer_id("", body.request_id, request)
        self._is_chat = isinstance(body, ChatRequest)
        self._prompts: Sequence[Prompt]
        if isinstance(body, ChatRequest):
            params = AnswerPlan(body, state).params
            if body.max_completion_tokens is not None:
                self.spelling = {**self.spelling, "max_tokens": "max_completion_tokens"}
            prompt = engine_prompt(chat_prompt_of(body, state), state)
            self._prompts, self._special = [prompt], special_tokens(prompt)
            if brings_media(prompt):
                raise UnsupportedFeature(f"messages: hold media, {_ELSEWHERE}", param="messages")
        else:
            asked = asked_of(body)
            self.spelling = {**self.spelling, **spelling_of(asked.field)}
            params = convert.completion_params(body, model, asked.constraint)
            _refuse(body, "prompt_embeds", "echo")
            self._prompts = convert.completion_prompts(body, model)
            self._special = body.add_special_tokens
        _refuse(body, "use_beam_search")
        if params.stop_strings:
            raise UnsupportedFeature(
                f"stop: is sought in text, {_ELSEWHERE}; send stop_token_ids", param="stop"
            )
        params.clone().validate()
        self._limits = params
        self._params = wire_params(params)

    async def respond(self) -> Response:
        """The answer: one request of a chat, a list of them of a completion.

        Raises:
            RequestError: a prompt cannot be written or tokenized.
        """
        engine = self.state.engine

        async def tokens(_: int, prompt: Prompt) -> list[int]:
            found = await engine.tokenize(prompt, add_special_tokens=self._special)
            ids = list(found.token_ids)
            self._check_length(len(ids))
            return ids

        ids = await in_order(tokens, self._prompts, _AT_ONCE)
        cost = sum(map(len, ids)) // _TOKENS
        return JsonAnswer(await self.state.off_loop(cost, self._encode, ids))

    def _check_length(self, count: int) -> None:
        """Refuse a prompt that would not be run: an empty one, or one too long.

        Args:
            count: its tokens.
        """
        source = "messages" if self._is_chat else "prompt"
        if not count:
            raise RequestError(f"{source}: must hold at least one token", param=source)
        params, limit = self._limits, self.state.engine.model.max_model_len
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > limit:
            raise RequestError(
                f"truncate_prompt_tokens = {keep}: must be at most {limit}, or -1",
                param="truncate_prompt_tokens",
            )
        least = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if keep == -1:
            keep = max(1, limit - least)
        count = count if keep is None else min(count, keep)
        room = limit - count
        if room < least:
            param = source if room < 1 or params.max_tokens is None else "max_tokens"
            raise PromptTooLong(limit, count, least, param=param, source=source)

    def _encode(self, ids: Sequence[list[int]]) -> bytes:
        if self._is_chat:
            return msgspec.json.encode(self._request(self.id, ids[0]))
        made = [self._request(f"{self.id}-{i}", one) for i, one in enumerate(ids)]
        return msgspec.json.encode(made)

    def _request(self, name: str, ids: list[int]) -> dict[str, Any]:
        body = self._body
        options = body.stream_options
        return {
            "request_id": name,
            "token_ids": encoded(ids, _SLICE),
            "sampling_params": self._params,
            "model": self.state.engine.model.name,
            "stream": body.stream,
            "stream_options": None if options is None else options.model_dump(),
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }


def wire_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as ``/inference/v1/generate`` takes them: those that are not the defaults of
    :class:`~headrace_core.sampling.params.SamplingParams`, and ``max_tokens``."""
    return dict(_wire_params(params, TokenSampling.model_fields))


def _wire_params(params: SamplingParams, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    defaults = SamplingParams()
    for name in names:
        value = getattr(params, name)
        if name == "logit_bias" and value:
            yield name, {str(token): bias for token, bias in value.items()}
        elif name == "structured_outputs" and value is not None:
            given = dataclasses.asdict(value)
            yield name, {key: held for key, held in given.items() if held not in (None, False)}
        elif name == "max_tokens" or value != getattr(defaults, name):
            yield name, value


def _refuse(body: SamplingBody, *names: str) -> None:
    for name in names:
        if getattr(body, name):
            raise RequestError(f"{name}: asks for something {_ELSEWHERE}", param=name)
