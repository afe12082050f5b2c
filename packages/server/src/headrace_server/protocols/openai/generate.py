"""One call of ``/inference/v1/generate``: token ids to the engine, token ids back.

For deployments that turn text into tokens somewhere else. Nothing is made text here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from fastapi import Request
from msgspec import UNSET, UnsetType

from headrace_core.engine import OutputStream
from headrace_core.errors import RequestError
from headrace_core.output import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from headrace_core.request import TokensPrompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_server.http.routing import respell
from headrace_server.observability.request_log import log_request
from headrace_server.observability.tally import Tally, usage
from headrace_server.protocols.openai.bodies.generate import (
    ChunkGeneratedPosition,
    ChunkGeneratedToken,
    ChunkGenerateLogprobs,
    GenerateChoice,
    GenerateChunk,
    GenerateChunkChoice,
    GenerateLogprobs,
    GenerateRequest,
    GenerateResponse,
    TokenSampling,
)
from headrace_server.protocols.openai.bodies.structured import StructuredOutputs
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.protocols.openai.logprobs import LEAST, bytes_of, finite, prompt_logprobs
from headrace_server.requests import convert
from headrace_server.requests.constraints import constraint_of, stop_reason
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import DirectWriter, Events, close, event
from headrace_server.streaming.offload import cost_of, encoded

_FEW = 32
"""Positions up to which log-probabilities are made of objects, which their reader encodes."""


_SAMPLING_SPELLING: Mapping[str, str] = {
    name: f"sampling_params.{name}"
    for name in (
        *TokenSampling.model_fields,
        *(f"structured_outputs.{f.alias or n}" for n, f in StructuredOutputs.model_fields.items()),
    )
}
"""The engine's names of sampling fields -> the client's."""


class TokenGeneration:
    """Checks a request when made; then either :meth:`whole` or :meth:`events`, once.

    Raises:
        RequestError: naming the field.
    """

    spelling: Mapping[str, str] = {
        "prompt": "token_ids",
        "prompt_token_ids": "token_ids",
        **_SAMPLING_SPELLING,
    }
    """The engine's names of fields -> the client's."""

    def __init__(self, body: GenerateRequest, request: Request, state: ServerState) -> None:
        self.body, self.state = body, state
        model = state.engine.model
        convert.check_model(body.model, model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        self._request_id = convert.answer_id("", body.request_id, request)
        self.id = f"generate-{self._request_id}"
        self._prompt = TokensPrompt(prompt_token_ids=body.token_ids)
        if body.cache_salt is not None:
            self._prompt["cache_salt"] = body.cache_salt
        self._params = _params(body, model, state)
        self._tally = Tally(state.metrics, self._params)
        self._running = False
        """True if each event has the usage so far."""

    async def whole(self) -> GenerateResponse:
        """The answer in one piece."""
        last: RequestOutput | None = None
        outputs = self._generate()
        try:
            async for output in outputs:
                self._tally.count(output)
                last = output
        finally:
            await close(outputs)
        assert last is not None, "an engine yields at least one output"
        return await self.state.off_loop(cost_of(last), self._answer, last)

    def _answer(self, last: RequestOutput) -> GenerateResponse:
        answer = GenerateResponse(
            request_id=self._request_id,
            choices=[self._choice(p) for p in sorted(last.outputs, key=lambda p: p.index)],
            usage=self._usage(),
            kv_transfer_params=last.kv_transfer_params,
        )
        if self._params.prompt_logprobs is not None and last.prompt_logprobs is not None:
            answer.prompt_logprobs = cast(Any, prompt_logprobs(last.prompt_logprobs))
        return answer

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        options = self.body.stream_options
        self._running = options is not None and options.continuous_usage_stats
        outputs = self._generate()
        try:
            async for output in outputs:
                off_loop = self.state.off_loop
                data = await off_loop(cost_of(output), self._encode, output)
                if data:
                    yield data
                if isinstance(outputs, OutputStream) and not output.finished:
                    yield DirectWriter(outputs, self._encode, off_loop=off_loop)
        finally:
            await close(outputs)
        forced = self.state.settings.enable_force_include_usage
        if forced or (options is not None and options.include_usage):
            yield event(self._wrap([], True))

    def _generate(self) -> AsyncIterator[RequestOutput]:
        name = convert.engine_id(self.id, 0)
        log_request(self.state, name, self._params, self._prompt)
        return self.state.engine.generate(
            self._prompt, self._params, name, priority=self.body.priority
        )

    def _encode(self, output: RequestOutput) -> bytes:
        """The event of one output; b"" if it says nothing."""
        self._tally.count(output)
        choices = [self._chunk(p) for p in output.outputs if p.token_ids or p.finish_reason]
        return event(self._wrap(choices, self._running)) if choices else b""

    def _chunk(self, part: CompletionOutput) -> GenerateChunkChoice:
        choice = GenerateChunkChoice(
            part.index, part.token_ids, self._logprobs(part), part.finish_reason
        )
        if (ended_by := stop_reason(part, self.spelling)) is not None:
            choice.stop_reason = ended_by
        return choice

    def _choice(self, part: CompletionOutput) -> GenerateChoice:
        choice = GenerateChoice(
            index=part.index,
            token_ids=part.token_ids,
            finish_reason=part.finish_reason,
            stop_reason=stop_reason(part, self.spelling),
        )
        choice.logprobs = cast(GenerateLogprobs | None, self._logprobs(part))  # see encode_answer
        return choice

    def _logprobs(self, part: CompletionOutput) -> ChunkGenerateLogprobs | None:
        count = self._params.logprobs
        if count is None or part.logprobs is None:
            return None
        positions = _positions(part.token_ids, part.logprobs, count)
        block = ChunkGenerateLogprobs([])
        if len(part.token_ids) > _FEW:
            block.content = cast(Any, encoded(positions))
        else:
            block.content.extend(positions)
        return block

    def _usage(self) -> Usage:
        return usage([self._tally], details=self.state.settings.enable_prompt_tokens_details)

    def _wrap(self, choices: list[GenerateChunkChoice], counted: bool) -> GenerateChunk:
        counts: dict[str, Any] | UnsetType = self._usage().model_dump() if counted else UNSET
        return GenerateChunk(self._request_id, choices, counts)


def _positions(
    token_ids: Sequence[int], positions: Iterable[PositionLogprobs | None], count: int
) -> Iterator[ChunkGeneratedPosition]:
    """The chosen token of each position, and its ``count`` likeliest; a negative count: all."""
    for token_id, given in zip(token_ids, positions, strict=True):
        entries = given or {}
        chosen = _token(token_id, entries.get(token_id))
        ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
        best = ordered if count < 0 else ordered[:count]
        top = [_token(other, entry) for other, entry in best]
        yield ChunkGeneratedPosition(
            chosen.token, token_id, chosen.logprob, chosen.rank, chosen.bytes, top
        )


def _token(token_id: int, entry: Logprob | None) -> ChunkGeneratedToken:
    name = f"token_id:{token_id}"
    if entry is None:
        return ChunkGeneratedToken(name, token_id, LEAST, None, None)
    own = bytes_of(entry)
    piece = None if own is None else list(own)
    return ChunkGeneratedToken(name, token_id, finite(entry.logprob), entry.rank, piece)


def _params(body: GenerateRequest, model: ServedModel, state: ServerState) -> SamplingParams:
    sampling = body.sampling_params
    sampling.check_fields(state, "sampling_params")
    convert.check_priority(body.priority, model)
    convert.check_logprobs("sampling_params.logprobs", sampling.logprobs, model)
    convert.check_logprobs("sampling_params.prompt_logprobs", sampling.prompt_logprobs, model)
    _refuse_texts(sampling)
    try:
        return _sampling_params(body, model)
    except RequestError as error:
        respell(error, _SAMPLING_SPELLING)
        raise


def _sampling_params(body: GenerateRequest, model: ServedModel) -> SamplingParams:
    """The parameters by the names that the engine has for them."""
    sampling = body.sampling_params
    convert.check_streaming(body.stream, body.stream_options, sampling.prompt_logprobs)
    transfer = convert.transfer_args(body.kv_transfer_params, stream=body.stream)
    return convert.sampling_params(
        sampling,
        model,
        max_tokens=sampling.max_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        stream=body.stream,
        detokenize=False,
        extra_args={**(sampling.extra_args or {}), **transfer} or None,
        constraint=(
            None
            if sampling.structured_outputs is None
            else constraint_of(sampling.structured_outputs)
        ),
    )


def _refuse_texts(sampling: TokenSampling) -> None:
    """Stop strings are sought in text, which is not made here."""
    if sampling.stop:
        raise RequestError(
            "sampling_params.stop: there is no text to search; send stop_token_ids",
            param="sampling_params.stop",
        )
