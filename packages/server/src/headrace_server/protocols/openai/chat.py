"""One call of ``/v1/chat/completions``: a turn, its pieces written as choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request
from msgspec import UNSET, UnsetType

from headrace_core.output import CompletionOutput, RequestOutput
from headrace_server.chat.segments import CallPiece, Content, Reasoning, Segment
from headrace_server.chat.turn import ChoiceDelta, Turn
from headrace_server.observability.tally import usage
from headrace_server.observability.weights_seen import WeightsSeen
from headrace_server.protocols.openai.bodies.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChatLogprobs,
    ChunkDelta,
    ChunkFunction,
    ChunkToolCall,
    FunctionCall,
    ToolCallOut,
)
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.protocols.openai.logprobs import chat_logprobs, prompt_logprobs
from headrace_server.requests import convert
from headrace_server.requests.constraints import spelling_of, stop_reason
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import Events, EventTemplate, event


class Chat:
    """Checks a request when made; then either :meth:`whole` or :meth:`events`, once.

    Args:
        position: among the conversations of one call.

    Raises:
        RequestError: naming the field.
    """

    def __init__(
        self, body: ChatRequest, request: Request, state: ServerState, *, position: int = 0
    ) -> None:
        self.body, self.state = body, state
        model = state.engine.model
        convert.check_model(body.model, model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        self.id = convert.answer_id("chatcmpl-", body.request_id, request)
        self._turn = Turn(body, state, self.id, position=position, in_order=False)
        self.tally = self._turn.tally
        """Tokens of the prompt and of all choices."""
        wins = body.max_completion_tokens is not None
        self.spelling: Mapping[str, str] = {
            "beam_width": "n",
            "max_tokens": "max_completion_tokens" if wins else "max_tokens",
            **spelling_of(self._turn.plan.constrained_by),
        }
        """The engine's names of fields -> the client's."""
        self._role = (
            state.settings.response_role
            if self._turn.chat.add_generation_prompt
            else body.messages[-1].role
        )
        self._created = int(time.time())
        self._model = model.name
        self.weights = WeightsSeen(state.fingerprint, body.return_weights_version)
        """Those that compute the answer, as far as they are known."""
        self._shows_ids = bool(body.return_token_ids)
        self._as_ids = convert.tokens_as_ids(body, state.settings)
        self._answer: ChatResponse | None = None
        self._plain: list[EventTemplate] = []
        """Templates of a stream whose events are nothing but text, by choice."""
        self._running = False
        """True if each event has the usage so far."""

    async def whole(self) -> ChatResponse:
        """The answer in one piece."""
        await self._turn.whole(self._take)
        answer = self._answer
        assert answer is not None, "an engine's last output is finished"
        await self._turn.count_reasoning()
        answer.usage = self._usage()
        return answer

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        options = self.body.stream_options
        self._running = options is not None and options.continuous_usage_stats
        self._plain = [] if self._running else self._templates()
        encode_text = self._encode_text if len(self._plain) == 1 else None
        async with aclosing(
            self._turn.events(self._encode, encode_text, opening=self._opening)
        ) as events:
            async for item in events:
                yield item
        forced = self.state.settings.enable_force_include_usage
        if forced or (options is not None and options.include_usage):
            await self._turn.count_reasoning()
            yield event(self._wrap([], True))

    def _encode(self, output: RequestOutput) -> bytes:
        """The events of one output; b"" if it says nothing."""
        self.tally.count(output)
        self._see_weights(output)
        events = []
        for part in output.outputs:
            if self._plain and part.finish_reason is None:
                if part.text:
                    events.append(self._plain[part.index](part.text))
                continue
            choice = self._chunk(self._turn.read(part))
            if choice is not None:
                events.append(event(self._wrap([choice], self._running)))
        return events[0] if len(events) == 1 else b"".join(events)

    def _encode_text(self, text: str, num_tokens: int) -> bytes:
        """The event of the only choice's text; b"" if there is none yet."""
        self.tally.add(num_tokens)
        return self._plain[0](text) if text else b""

    def _see_weights(self, output: RequestOutput) -> None:
        if self.weights.see(output.weights_versions) and self._plain:
            self._plain = self._templates()  # which hold the fingerprint

    def _echoed(self) -> str:
        """The last message's text, if it is to be repeated in front of the answer."""
        if not self.body.echo or self.body.messages[-1].role != self._role:
            return ""
        content = self._turn.chat.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "".join(part["text"] for part in content)

    # The whole answer

    def _take(self, output: RequestOutput) -> None:
        pieces = self._turn.take(output)
        if not output.finished:
            return
        self.weights.see(output.weights_versions)
        self._answer = ChatResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(p) for p in sorted(pieces, key=lambda p: p.output.index)],
            usage=self._usage(),
            system_fingerprint=self.weights.fingerprint,
            weights_versions=self.weights.shown,
            kv_transfer_params=output.kv_transfer_params,
            prompt_token_ids=output.prompt_token_ids if self._shows_ids else None,
        )
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            self._answer.prompt_logprobs = cast(Any, prompt_logprobs(output.prompt_logprobs))

    def _choice(self, piece: ChoiceDelta) -> ChatChoice:
        part = piece.output
        choice = ChatChoice(
            index=part.index,
            message=self._message(part.index, piece.segments),
            finish_reason=self._finish_reason(piece),
            stop_reason=stop_reason(part, self.spelling),
            token_ids=part.token_ids if self._shows_ids else None,
        )
        choice.logprobs = cast(ChatLogprobs | None, self._logprobs(part))  # see encode_answer
        return choice

    def _message(self, choice: int, segments: Sequence[Segment]) -> ChatAnswer:
        calls = [
            ToolCallOut(
                id=self._call_id(choice, index, name),
                function=FunctionCall(name=name, arguments=arguments),
            )
            for index, name, arguments in _whole_calls(segments)
        ]
        said, reasoning = _texts(segments)
        content: str | None = self._echoed() + said
        if not content and (calls or reasoning):
            content = None
        return ChatAnswer(
            role=self._role,
            content=content,
            tool_calls=calls or None,
            reasoning=reasoning or None,
            reasoning_content=reasoning or None,
        )

    def _call_id(self, choice: int, index: int, name: str) -> str:
        own = self._turn.call_id(choice, index, name)
        return own if own is not None else f"chatcmpl-tool-{uuid.uuid4().hex}"

    def _finish_reason(self, piece: ChoiceDelta) -> str | None:
        return self._turn.plan.tools.finish_reason if piece.called else piece.output.finish_reason

    def _logprobs(self, part: CompletionOutput) -> ChunkChatLogprobs | None:
        if part.logprobs is None or not self.body.logprobs:
            return None
        count = self.body.top_logprobs or 0
        return chat_logprobs(part.token_ids, part.logprobs, count, self._as_ids)

    # Streams

    def _opening(self, output: RequestOutput) -> bytes:
        """One chunk per choice with the role, and the echo."""
        chunks = []
        self._see_weights(output)
        echoed = self._echoed()
        for index in range(self.body.n):
            delta = ChunkDelta(role=self._role, content=echoed)
            chunk = self._wrap([ChatChunkChoice(index, delta)], self._running)
            if self._shows_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            chunks.append(event(chunk))
        return b"".join(chunks)

    def _templates(self) -> list[EventTemplate]:
        """By choice, for streams whose events are nothing but text; none for others."""
        if not self._turn.is_plain:
            return []

        def template(index: int) -> EventTemplate:
            return EventTemplate(
                lambda text: self._wrap([ChatChunkChoice(index, ChunkDelta(content=text))], False)
            )

        return [template(index) for index in range(self.body.n)]

    def _chunk(self, piece: ChoiceDelta) -> ChatChunkChoice | None:
        """New parts of a choice; None if there is nothing to say."""
        part = piece.output
        delta = self._delta(part.index, piece.segments)
        choice = ChatChunkChoice(
            part.index,
            delta,
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(piece),
        )
        if part.finish_reason and (ended_by := stop_reason(part, self.spelling)) is not None:
            choice.stop_reason = ended_by
        if self._shows_ids:
            choice.token_ids = part.token_ids
        speaks = (
            delta.content
            or delta.reasoning
            or delta.tool_calls
            or choice.finish_reason
            or choice.logprobs
            or (self._shows_ids and part.token_ids)
        )
        return choice if speaks else None

    def _delta(self, choice: int, segments: Sequence[Segment]) -> ChunkDelta:
        delta = ChunkDelta()
        for segment in segments:
            if isinstance(segment, Content):
                delta.content = (delta.content or "") + segment.text
            elif isinstance(segment, Reasoning):
                delta.reasoning = (delta.reasoning or "") + segment.text
            elif isinstance(segment, CallPiece):
                delta.tool_calls = delta.tool_calls or []
                delta.tool_calls.append(self._chunk_call(choice, segment))
        delta.reasoning_content = delta.reasoning
        return delta

    def _chunk_call(self, choice: int, piece: CallPiece) -> ChunkToolCall:
        function = ChunkFunction(piece.name, piece.arguments)
        if piece.name is None:
            return ChunkToolCall(piece.index, function=function)
        name = self._call_id(choice, piece.index, piece.name)
        return ChunkToolCall(piece.index, name, "function", function)

    def _usage(self) -> Usage:
        return usage([self.tally], details=self.state.settings.enable_prompt_tokens_details)

    def _wrap(self, choices: list[ChatChunkChoice], counted: bool) -> ChatChunk:
        counts: dict[str, Any] | UnsetType = self._usage().model_dump() if counted else UNSET
        fingerprint = self.weights.fingerprint
        chunk = ChatChunk(self.id, self._created, self._model, choices, fingerprint, counts)
        if any(choice.finish_reason for choice in choices):
            chunk.weights_versions = self.weights.shown or UNSET
        return chunk


def _texts(segments: Sequence[Segment]) -> tuple[str, str]:
    """Content and reasoning of segments."""
    content = "".join([s.text for s in segments if isinstance(s, Content)])
    return content, "".join([s.text for s in segments if isinstance(s, Reasoning)])


def _whole_calls(segments: Sequence[Segment]) -> list[tuple[int, str, str]]:
    """(index, name, arguments) of calls, with their pieces put together."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for piece in segments:
        if isinstance(piece, CallPiece):
            names[piece.index] = names.get(piece.index) or piece.name or ""
            arguments.setdefault(piece.index, []).append(piece.arguments)
    return [(index, names[index], "".join(arguments[index])) for index in sorted(names)]
