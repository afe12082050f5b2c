"""One call of ``/v1/chat/completions/batch``: chats side by side, their choices in one answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.http.routing import respell
from headrace_server.observability.tally import Tally, usage
from headrace_server.observability.weights_seen import WeightsSeen
from headrace_server.protocols.base import MAX_SEQUENCES
from headrace_server.protocols.openai.bodies.batch_chat import (
    BatchChatChoice,
    BatchChatRequest,
    BatchChatResponse,
)
from headrace_server.protocols.openai.bodies.chat import ChatMessage, ChatRequest, ChatResponse
from headrace_server.protocols.openai.chat import Chat
from headrace_server.requests import convert
from headrace_server.requests.bounded_gather import in_order
from headrace_server.state import ServerState

PARALLEL = 256
"""Conversations of one call that run at a time."""


class BatchChat:
    """Checks what conversations share when made; then :meth:`whole`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: BatchChatRequest, request: Request, state: ServerState) -> None:
        self.body, self.state, self._request = body, state, request
        convert.check_model(body.model, state.engine.model)
        body.check_fields(state)
        if body.stream:
            raise UnsupportedFeature(
                "stream: answers to several conversations cannot be streamed; leave it out",
                param="stream",
            )
        count = len(body.messages)
        most = min(MAX_SEQUENCES, state.settings.request_limits.get("prompt", MAX_SEQUENCES))
        if count > most or count * body.n > MAX_SEQUENCES:
            raise RequestError(
                f"messages: {count} conversations with n = {body.n}; at most {most} conversations and "
                f"{MAX_SEQUENCES} answers are made in one call",
                param="messages",
            )
        self.id = convert.answer_id("chatcmpl-", body.request_id, request)
        self._created = int(time.time())
        self._tallies: list[Tally] = []
        self._weights = WeightsSeen(state.fingerprint, body.return_weights_version)

    async def whole(self) -> BatchChatResponse:
        """The answer. The first conversation that fails ends all.

        Raises:
            RequestError: with the conversation as ``param``, if it is to blame.
        """
        conversations = self.body.messages
        answers = await in_order(self._answer, conversations, PARALLEL)
        choices = [
            choice
            for position, answer in enumerate(answers)
            for choice in self._choices(position, answer)
        ]
        return BatchChatResponse.model_construct(
            id=self.id,
            created=self._created,
            model=self.state.engine.model.name,
            choices=choices,
            system_fingerprint=self._weights.fingerprint,
            weights_versions=self._weights.shown,
            usage=usage(self._tallies, details=self.state.settings.enable_prompt_tokens_details),
        )

    async def _answer(self, position: int, messages: list[ChatMessage]) -> ChatResponse:
        spelling: Mapping[str, str] = {}
        try:
            call = Chat(self._one(messages), self._request, self.state, position=position)
            spelling = call.spelling
            self._tallies.append(call.tally)
            answer = await call.whole()
            self._weights.see(call.weights.versions)
            return answer
        except RequestError as error:
            respell(error, spelling)
            field = error.param or ""
            inside = field.startswith("messages") or field in ("prompt", "prompt_token_ids")
            below = field.removeprefix("messages") if field.startswith("messages[") else ""
            error.param = f"messages[{position}]{below}" if inside else field or None
            told = str(error)
            if told.startswith(("messages[", "messages:")):  # of this conversation
                error.args = (f"messages[{position}]{told.removeprefix('messages')}",)
            raise

    def _one(self, messages: list[ChatMessage]) -> ChatRequest:
        """The request for one conversation; its fields have been checked."""
        values: dict[str, Any] = {
            name: getattr(self.body, name) for name in ChatRequest.model_fields
        }
        one = ChatRequest.model_construct(
            set(self.body.model_fields_set), **{**values, "messages": messages}
        )
        one.name_tools(self.body.tool_paths)
        return one

    def _choices(self, position: int, answer: ChatResponse) -> list[BatchChatChoice]:
        made = []
        for choice in answer.choices:
            first = choice.index == 0
            fields: dict[str, Any] = {
                name: getattr(choice, name) for name in type(choice).model_fields
            }
            fields["index"] = position * self.body.n + choice.index
            fields["prompt_token_ids"] = answer.prompt_token_ids if first else None
            fields["prompt_logprobs"] = answer.prompt_logprobs if first else None
            made.append(BatchChatChoice.model_construct(**fields))
        return made
