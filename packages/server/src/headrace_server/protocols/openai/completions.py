"""One call of ``/v1/completions``: prompts to the engine, outputs to choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from fastapi import Request
from msgspec import UNSET, UnsetType

from headrace_core.engine import OutputStream
from headrace_core.errors import RequestError
from headrace_core.output import CompletionOutput, Logprobs, RequestOutput
from headrace_core.request import Prompt
from headrace_server.chat.beam import beam_outputs, beams_of
from headrace_server.http.routing import respell
from headrace_server.observability.request_log import log_request
from headrace_server.observability.tally import Tally, usage
from headrace_server.observability.weights_seen import WeightsSeen
from headrace_server.protocols.openai.bodies.completions import (
    ChunkLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.protocols.openai.logprobs import CompletionFormat, prompt_logprobs
from headrace_server.requests import convert
from headrace_server.requests.constraints import asked_of, spelling_of, stop_reason
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import (
    DirectWriter,
    Events,
    EventTemplate,
    NumberedStream,
    close,
    event,
    merge,
)
from headrace_server.streaming.offload import cost_of, seal


@dataclass
class _Echo:
    """The prompt as it is repeated in front of completions."""

    text: str
    first_token: str
    logprobs: Logprobs | None


@dataclass
class _Choice:
    """State of one choice of a stream."""

    format: CompletionFormat | None
    opened: bool = False


@dataclass
class _Shown:
    """Parts of one output that a choice shows."""

    text: str = ""
    logprobs: ChunkLogprobs | None = None
    token_ids: list[int] = field(default_factory=list)


class Completion:
    """Checks a request when made; then either :meth:`whole` or :meth:`events`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: CompletionRequest, request: Request, state: ServerState) -> None:
        self.body, self.state = body, state
        self.spelling: Mapping[str, str] = {
            "prompt_token_ids": "prompt",
            "beam_width": "n",
        }
        """The engine's names of fields -> the client's."""
        model = state.engine.model
        convert.check_model(body.model, model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        self.id = convert.answer_id("cmpl-", body.request_id, request)
        asked = asked_of(body)
        self.spelling = {**self.spelling, **spelling_of(asked.field)}
        self._params = convert.completion_params(body, model, asked.constraint)
        self._prompts = convert.completion_prompts(body, model)
        self._beams = beams_of(body, self._params.max_tokens)
        self._created = int(time.time())
        self._model = model.name
        self._weights = WeightsSeen(state.fingerprint, body.return_weights_version)
        self._prompt_only = body.max_tokens == 0
        self._as_ids = convert.tokens_as_ids(body, state.settings)
        self._echoes: dict[int, _Echo] = {}
        self._choices: list[_Choice] = []
        """Choices of a stream, by index."""
        self._plain: list[EventTemplate] = []
        """Templates of a stream whose events are nothing but text, by index."""
        self._running = False
        """True if each event has the usage so far."""
        self._tallies = [Tally(state.metrics, self._params) for _ in self._prompts]

    async def whole(self) -> CompletionResponse:
        """The answer in one piece."""
        choices: dict[int, CompletionChoice] = {}
        transfer: dict[str, Any] | None = None
        outputs = self._outputs()
        try:
            async for position, output in outputs:
                self._tallies[position].count(output)
                if not output.finished:
                    continue
                self._weights.see(output.weights_versions)
                transfer = output.kv_transfer_params or transfer
                echo = await self._echo(position, output)
                cost = cost_of(output)
                made = await self.state.off_loop(cost, self._choices_of, position, output, echo)
                choices |= {choice.index: choice for choice in made}
                await asyncio.sleep(0)  # there may be many prompts, and others wait
        finally:
            await close(outputs)
        return CompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[choices[index] for index in sorted(choices)],
            usage=self._usage(),
            system_fingerprint=self._weights.fingerprint,
            weights_versions=self._weights.shown,
            kv_transfer_params=transfer,
        )

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        options = self.body.stream_options
        forced = self.state.settings.enable_force_include_usage
        self._running = options is not None and options.continuous_usage_stats
        self._choices = [_Choice(self._format()) for _ in range(len(self._prompts) * self.body.n)]
        self._plain = [] if self._running else self._templates()
        outputs = self._outputs()
        try:
            async for position, output in outputs:
                echo = await self._echo(position, output)
                off_loop, encode = self.state.off_loop, partial(self._encode, position, echo)
                data = await off_loop(cost_of(output), encode, output)
                if data:
                    yield data
                if output.finished or not isinstance(outputs, NumberedStream):
                    continue
                if isinstance(outputs.stream, OutputStream):
                    encode_text = self._encode_text if len(self._plain) == 1 else None
                    yield DirectWriter(outputs.stream, encode, encode_text, off_loop=off_loop)
        finally:
            await close(outputs)
        if forced or (options is not None and options.include_usage):
            yield event(self._wrap([], self._usage()))

    def _encode(self, position: int, echo: _Echo | None, output: RequestOutput) -> bytes:
        """The events of one output; b"" if it says nothing."""
        self._tallies[position].count(output)
        if self._weights.see(output.weights_versions) and self._plain:
            self._plain = self._templates()  # which hold the fingerprint
        events = []
        for part in output.outputs:
            index = position * self.body.n + part.index
            if self._plain and part.finish_reason is None:
                if part.text:
                    events.append(self._plain[index](part.text))
                continue
            chunk = self._chunk(self._choices[index], index, part, output, echo)
            if chunk is not None:
                used = self._usage() if self._running else None
                events.append(event(self._wrap([chunk], used)))
        return events[0] if len(events) == 1 else b"".join(events)

    def _encode_text(self, text: str, num_tokens: int) -> bytes:
        """The event of the only choice's text; b"" if there is none yet."""
        self._tallies[0].add(num_tokens)
        return self._plain[0](text) if text else b""

    def _templates(self) -> list[EventTemplate]:
        """By choice, for streams whose events are nothing but text; none for others."""
        body = self.body
        plain = not (body.echo or body.return_token_ids or self._prompt_only)
        if not plain or body.logprobs is not None:
            return []

        def template(index: int) -> EventTemplate:
            return EventTemplate(
                lambda text: self._wrap([CompletionChunkChoice(index, text)], None)
            )

        return [template(index) for index in range(len(self._prompts) * body.n)]

    def _outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """The outputs of all prompts, each with its prompt's position. Closing aborts."""
        streams = [self._generate(i, prompt) for i, prompt in enumerate(self._prompts)]
        blame = self._name_prompt
        return NumberedStream(streams[0], blame) if len(streams) == 1 else merge(streams, blame)

    def _name_prompt(self, position: int, error: RequestError) -> None:
        """Name the prompt that an error is about, where a request has several."""
        given = self.body.prompt
        if not isinstance(given, list) or isinstance(given[0], int):
            return
        index = position - (len(self._prompts) - len(given))  # embeddings come first
        if index >= 0:
            respell(error, dict.fromkeys(("prompt", "prompt_token_ids"), f"prompt[{index}]"))

    def _generate(self, position: int, prompt: Prompt) -> AsyncIterator[RequestOutput]:
        name = convert.engine_id(self.id, position)
        log_request(self.state, name, self._params, prompt)
        if self._beams is not None:
            return beam_outputs(
                self.state.engine,
                prompt,
                self._beams,
                name,
                priority=self.body.priority,
                add_special_tokens=self.body.add_special_tokens,
            )
        return self.state.engine.generate(
            prompt,
            self._params,
            name,
            priority=self.body.priority,
            add_special_tokens=self.body.add_special_tokens,
        )

    def _format(self) -> CompletionFormat | None:
        if self.body.logprobs is None:
            return None
        return CompletionFormat(self.body.logprobs, self._as_ids)

    async def _echo(self, position: int, output: RequestOutput) -> _Echo | None:
        """Made from a prompt's first output: later ones repeat no log-probabilities."""
        if not self.body.echo:
            return None
        if position not in self._echoes:
            engine, ids = self.state.engine, output.prompt_token_ids
            text = output.prompt
            if text is None or self.body.truncate_prompt_tokens is not None:
                text = await engine.detokenize(ids)
            first = await engine.detokenize(ids[:1]) if self.body.logprobs is not None else ""
            self._echoes[position] = _Echo(text, first, output.prompt_logprobs)
        return self._echoes[position]

    def _show(
        self,
        part: CompletionOutput,
        output: RequestOutput,
        echo: _Echo | None,
        form: CompletionFormat | None,
    ) -> _Shown:
        """Echo and generated part together; the latter not if only the prompt was asked for."""
        shown = _Shown()
        blocks = []
        if echo is not None:
            shown.text = echo.text
            if form is not None and echo.logprobs is not None:
                special = {text.encode() for text in self.state.engine.model.special_tokens}
                ids, first = output.prompt_token_ids, echo.first_token
                blocks.append(form.build_prompt(ids, echo.logprobs, first, echo.text, special))
        if not self._prompt_only:
            shown.text += part.text
            shown.token_ids = part.token_ids
            if form is not None and part.logprobs is not None:
                blocks.append(form.build(part.token_ids, part.logprobs))
        shown.logprobs = _join(blocks)
        return shown

    def _choices_of(
        self, position: int, output: RequestOutput, echo: _Echo | None
    ) -> list[CompletionChoice]:
        """Choices of one prompt."""
        first = position * self.body.n
        return [self._choice(first + part.index, part, output, echo) for part in output.outputs]

    def _choice(
        self, index: int, part: CompletionOutput, output: RequestOutput, echo: _Echo | None
    ) -> CompletionChoice:
        shown = self._show(part, output, echo, self._format())
        ids = bool(self.body.return_token_ids)
        choice = CompletionChoice(
            index=index,
            text=shown.text,
            finish_reason="length" if self._prompt_only else part.finish_reason,
            stop_reason=None if self._prompt_only else stop_reason(part, self.spelling),
            token_ids=shown.token_ids if ids else None,
            prompt_token_ids=output.prompt_token_ids if ids else None,
        )
        choice.logprobs = cast(CompletionLogprobs | None, shown.logprobs)  # see encode_answer
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = cast(Any, prompt_logprobs(output.prompt_logprobs))
        return choice

    def _chunk(
        self,
        choice: _Choice,
        index: int,
        part: CompletionOutput,
        output: RequestOutput,
        echo: _Echo | None,
    ) -> CompletionChunkChoice | None:
        """New parts of a choice; None if there is nothing to say."""
        first, choice.opened = not choice.opened, True
        shown = self._show(part, output, echo if first else None, choice.format)
        ids = bool(self.body.return_token_ids)
        chunk = CompletionChunkChoice(
            index=index,
            text=shown.text,
            logprobs=shown.logprobs,
            finish_reason=part.finish_reason,
            stop_reason=stop_reason(part, self.spelling),
            token_ids=shown.token_ids if ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if ids and first else UNSET,
        )
        if self._prompt_only:
            chunk.finish_reason, chunk.stop_reason = "length", None
        speaks = chunk.text or chunk.logprobs or chunk.finish_reason or (ids and shown.token_ids)
        return chunk if speaks else None

    def _usage(self) -> Usage:
        hidden = sum(sum(t.num_tokens.values()) for t in self._tallies) * self._prompt_only
        details = self.state.settings.enable_prompt_tokens_details
        return usage(self._tallies, details=details, hidden=hidden)

    def _wrap(self, choices: list[CompletionChunkChoice], used: Usage | None) -> CompletionChunk:
        counts: object | UnsetType = used.model_dump() if used is not None else UNSET
        chunk = CompletionChunk(
            self.id, self._created, self._model, choices, self._weights.fingerprint, counts
        )
        if any(choice.finish_reason for choice in choices):
            chunk.weights_versions = self._weights.shown or UNSET
        return chunk


def _join(blocks: list[ChunkLogprobs]) -> ChunkLogprobs | None:
    if not blocks:
        return None
    first, *others = blocks
    for other in others:
        first.text_offset += other.text_offset
        first.token_logprobs += other.token_logprobs
        first.tokens += other.tokens
        first.top_logprobs += other.top_logprobs
    return seal(first)
