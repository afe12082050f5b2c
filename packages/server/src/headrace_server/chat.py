"""One call of ``/v1/chat/completions``: a conversation to the engine, outputs to choices."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from fastapi import Request
from msgspec import UNSET, UnsetType

from headrace_core.engine import OutputStream
from headrace_core.errors import UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.text import ParsedDelta, ToolCall, ToolCallDelta
from headrace_server import convert
from headrace_server.answers import AnswerPlan
from headrace_server.beam import beam_outputs, beams_of
from headrace_server.conversation import chat_of, reasoning_tokens, special_tokens, spelled
from headrace_server.counting import Tally, usage
from headrace_server.harmony.answer import HarmonyParser
from headrace_server.logprobs import chat_logprobs, prompt_logprobs
from headrace_server.offload import cost_of
from headrace_server.parsing import AnswerParser, is_cut
from headrace_server.protocol.chat import (
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
from headrace_server.protocol.usage import Usage
from headrace_server.request_log import log_request
from headrace_server.state import ServerState
from headrace_server.stream import Events, EventTemplate, Pour, close, event
from headrace_server.structured import spelling_of

Parser = AnswerParser | HarmonyParser


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
        self._position = position
        model = state.engine.model
        convert.check_model(body.model, model)
        body.check_fields(state)
        convert.refuse_rank(request)
        self.id = convert.answer_id("chatcmpl-", body.request_id, request)
        self._plan = AnswerPlan(body, state)
        self._params = self._plan.params
        wins = body.max_completion_tokens is not None
        self.spelling: Mapping[str, str] = {
            "beam_width": "n",
            "max_tokens": "max_completion_tokens" if wins else "max_tokens",
            **spelling_of(self._plan.constrained_by),
        }
        """The engine's names of fields -> the client's."""
        self._beams = beams_of(body, self._params.max_tokens)
        if self._beams is not None:
            self._check_beams()
        self._chat = chat_of(body, state)
        self._prompt = spelled(self._chat, state)
        """The same as the engine is given it."""
        self._role = (
            state.settings.response_role
            if self._chat.add_generation_prompt
            else body.messages[-1].role
        )
        self._created = int(time.time())
        self._model = model.name
        self._fingerprint = state.fingerprint.name
        self._as_ids = convert.tokens_as_ids(body, state.settings)
        self._parsers: list[AnswerParser] | list[HarmonyParser] = []
        """Of the choices, by index; made from the first output."""
        self.tally = Tally(state.metrics, self._params)
        """Tokens of the prompt and of all choices."""
        self._plain: list[EventTemplate] = []
        """Of a stream whose events are nothing but text, by index."""
        self._running = False
        """Whether each event has the usage so far."""

    def _check_beams(self) -> None:
        if self._params.structured_outputs is not None:
            raise UnsupportedFeature(
                "tool_choice: not along with use_beam_search", param="tool_choice"
            )
        if self._plan.harmony:
            raise UnsupportedFeature(
                "use_beam_search: the texts of beams have no marks, without which this model's "
                "answers cannot be read",
                param="use_beam_search",
            )

    async def whole(self) -> ChatResponse:
        """The answer in one piece."""
        last: RequestOutput | None = None
        outputs = self._generate()
        try:
            with self._plan.naming_tools():
                async for output in outputs:
                    self.tally.count(output)
                    last = output
        finally:
            await close(outputs)
        assert last is not None, "an engine yields at least one output"
        self._parsers = await self._plan.make_parsers(last, self._chat)
        answer = await self.state.off_loop(cost_of(last), self._answer, last)
        await self._count_reasoning()
        answer.usage = self._usage()
        return answer

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        options = self.body.stream_options
        self._running = options is not None and options.continuous_usage_stats
        self._plain = [] if self._running else self._templates()
        outputs = self._generate()
        opened = False
        try:
            with self._plan.naming_tools():
                async for output in outputs:
                    opening = b""
                    if not opened:
                        self._parsers = await self._plan.make_parsers(output, self._chat)
                        opening, opened = self._opening(output), True
                    off_loop = self.state.off_loop
                    data = opening + await off_loop(cost_of(output), self._encode, output)
                    if data:
                        yield data
                    if isinstance(outputs, OutputStream) and not output.finished:
                        encode_text = self._encode_text if len(self._plain) == 1 else None
                        yield Pour(outputs, self._encode, encode_text, off_loop=off_loop)
        finally:
            await close(outputs)
        forced = self.state.settings.enable_force_include_usage
        if forced or (options is not None and options.include_usage):
            await self._count_reasoning()
            yield event(self._wrap([], True))

    def _encode(self, output: RequestOutput) -> bytes:
        """The events of one output; b"" if it says nothing."""
        self.tally.count(output)
        events = []
        for part in output.outputs:
            if self._plain and part.finish_reason is None:
                if part.text:
                    events.append(self._plain[part.index](part.text))
                continue
            choice = self._chunk(part)
            if choice is not None:
                events.append(event(self._wrap([choice], self._running)))
        return events[0] if len(events) == 1 else b"".join(events)

    def _encode_text(self, text: str, num_tokens: int) -> bytes:
        """The event of the only choice's text; b"" if there is none yet."""
        self.tally.add(num_tokens)
        return self._plain[0](text) if text else b""

    def _generate(self) -> AsyncIterator[RequestOutput]:
        name = convert.engine_id(self.id, self._position)
        log_request(self.state.settings, name, self._params, self._prompt)
        special = special_tokens(self._prompt)
        if self._beams is not None:
            return beam_outputs(
                self.state.engine,
                self._prompt,
                self._beams,
                name,
                priority=self.body.priority,
                add_special_tokens=special,
            )
        return self.state.engine.generate(
            self._prompt,
            self._params,
            name,
            priority=self.body.priority,
            add_special_tokens=special,
        )

    def _echoed(self) -> str:
        """The last message's text, if it is to be repeated in front of the answer."""
        if not self.body.echo or self.body.messages[-1].role != self._role:
            return ""
        content = self._chat.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return "".join(part["text"] for part in content)

    # The whole answer

    def _answer(self, last: RequestOutput) -> ChatResponse:
        ids = bool(self.body.return_token_ids)
        answer = ChatResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(p) for p in sorted(last.outputs, key=lambda p: p.index)],
            usage=self._usage(),
            system_fingerprint=self._fingerprint,
            prompt_token_ids=last.prompt_token_ids if ids else None,
        )
        if self.body.prompt_logprobs is not None and last.prompt_logprobs is not None:
            answer.prompt_logprobs = cast(Any, prompt_logprobs(last.prompt_logprobs))
        return answer

    def _choice(self, part: CompletionOutput) -> ChatChoice:
        part, parser = self._plan.without_end(part), self._parsers[part.index]
        parsed = parser.feed(part.text, last=True, cut=is_cut(part))
        choice = ChatChoice(
            index=part.index,
            message=self._message(parser, parsed),
            finish_reason=self._finish_reason(part),
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if self.body.return_token_ids else None,
        )
        choice.logprobs = cast(ChatLogprobs | None, self._logprobs(part))  # see encode_answer
        return choice

    def _message(self, parser: Parser, parsed: ParsedDelta) -> ChatAnswer:
        calls = [
            ToolCallOut(
                id=parser.call_id(index, call.name),
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for index, call in _joined(parsed)
        ]
        structured = bool(calls) or bool(parsed.reasoning)
        content: str | None = self._echoed() + parsed.content
        return ChatAnswer(
            role=self._role,
            content=None if structured and not content else content,
            tool_calls=calls or None,
            reasoning=parsed.reasoning or None,
            reasoning_content=parsed.reasoning or None,
        )

    def _finish_reason(self, part: CompletionOutput) -> str | None:
        parser = self._parsers[part.index]
        called = parser.called and part.finish_reason == "stop" and not parser.ends_in_call
        return self._plan.tools.finish_reason if called else part.finish_reason

    def _logprobs(self, part: CompletionOutput) -> ChunkChatLogprobs | None:
        if not self.body.logprobs or part.logprobs is None:
            return None
        count = self.body.top_logprobs or 0
        return chat_logprobs(part.token_ids, part.logprobs, count, self._as_ids)

    # Streams

    def _opening(self, output: RequestOutput) -> bytes:
        """One chunk per choice with the role, and the echo."""
        chunks = []
        echoed = self._echoed()
        self.tally.count_prompt(output)
        for index in range(self.body.n):
            delta = ChunkDelta(role=self._role, content=echoed)
            chunk = self._wrap([ChatChunkChoice(index, delta)], self._running)
            if self.body.return_token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            chunks.append(event(chunk))
        return b"".join(chunks)

    def _templates(self) -> list[EventTemplate]:
        """By choice, for streams whose events are nothing but text; none for others."""
        if self._plan.is_parsed or self.body.logprobs or self.body.return_token_ids:
            return []

        def template(index: int) -> EventTemplate:
            return EventTemplate(
                lambda text: self._wrap([ChatChunkChoice(index, ChunkDelta(content=text))], False)
            )

        return [template(index) for index in range(self.body.n)]

    def _chunk(self, part: CompletionOutput) -> ChatChunkChoice | None:
        """What is new in a choice; None if there is nothing to say."""
        part, parser = self._plan.without_end(part), self._parsers[part.index]
        parsed = parser.feed(part.text, last=part.finished(), cut=is_cut(part))
        choice = ChatChunkChoice(
            part.index,
            _delta(parser, parsed),
            logprobs=self._logprobs(part),
            finish_reason=self._finish_reason(part),
        )
        if part.stop_reason is not None:
            choice.stop_reason = part.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = part.token_ids
        speaks = (
            parsed.content
            or parsed.reasoning
            or parsed.tool_calls
            or choice.finish_reason
            or choice.logprobs
            or (self.body.return_token_ids and part.token_ids)
        )
        return choice if speaks else None

    async def _count_reasoning(self) -> None:
        self.tally.num_reasoning_tokens = await reasoning_tokens(self.state, self._parsers)

    def _usage(self) -> Usage:
        return usage([self.tally], details=self.state.settings.enable_prompt_tokens_details)

    def _wrap(self, choices: list[ChatChunkChoice], counted: bool) -> ChatChunk:
        counts: dict[str, Any] | UnsetType = self._usage().model_dump() if counted else UNSET
        return ChatChunk(self.id, self._created, self._model, choices, self._fingerprint, counts)


def _delta(parser: Parser, parsed: ParsedDelta) -> ChunkDelta:
    delta = ChunkDelta()
    if parsed.content:
        delta.content = parsed.content
    if parsed.reasoning:
        delta.reasoning = delta.reasoning_content = parsed.reasoning
    if parsed.tool_calls:
        delta.tool_calls = [_chunk_call(parser, call) for call in parsed.tool_calls]
    return delta


def _chunk_call(parser: Parser, call: ToolCallDelta) -> ChunkToolCall:
    function = ChunkFunction(call.name, call.arguments)
    if call.name is None:
        return ChunkToolCall(call.index, function=function)
    return ChunkToolCall(call.index, parser.call_id(call.index, call.name), "function", function)


def _joined(parsed: ParsedDelta) -> list[tuple[int, ToolCall]]:
    """Tool calls with their pieces put together, each with its index."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for piece in parsed.tool_calls:
        names[piece.index] = names.get(piece.index) or piece.name or ""
        arguments.setdefault(piece.index, []).append(piece.arguments)
    return [(i, ToolCall(names[i], "".join(arguments[i]))) for i in sorted(names)]
