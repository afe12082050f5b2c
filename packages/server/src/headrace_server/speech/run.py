"""One call of a speech route: upload -> transcript -> the answer in the form asked for."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from msgspec import UNSET
from pydantic import BaseModel

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.speech.model import AudioClip, SpeechModel, SpeechTask
from headrace_core.speech.transcription import (
    FALLBACK_TEMPERATURES,
    Transcript,
    TranscriptionParams,
)
from headrace_server.observability.request_log import log_request
from headrace_server.observability.tally import Tally
from headrace_server.protocols.openai.bodies.usage import Usage
from headrace_server.requests import convert
from headrace_server.speech.protocol import (
    AudioUsage,
    ChunkChoice,
    ChunkDelta,
    SpeechChunk,
    SpeechRequest,
    Transcription,
    TranscriptionRequest,
    VerboseTranscription,
)
from headrace_server.speech.upload import Upload
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import Events, close, event

_COPIED = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


class SpeechCall:
    """Checks a request when made; then either :meth:`whole` or :meth:`events`, once.

    Args:
        body: the form's fields.
        upload: the form's file.
        task: which of the two routes it is.

    Raises:
        RequestError: naming the field.
    """

    spelling: Mapping[str, str] = {
        "max_tokens": "max_completion_tokens",
        "extra_args": "headrace_xargs",
        "multi_modal_data": "file",
        "request_prompt": "prompt",
    }
    """The engine's names of fields -> the client's."""

    def __init__(
        self,
        body: SpeechRequest,
        upload: Upload,
        task: SpeechTask,
        request: Request,
        state: ServerState,
    ) -> None:
        assert state.engine.speech is not None, "the routes are there only if the model transcribes"
        self.body, self.state = body, state
        self.speech: SpeechModel = state.engine.speech
        self._upload = upload
        self._task: SpeechTask = task
        convert.check_model(body.model, state.engine.model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        prefix = "trsc-" if task == "transcribe" else "trsl-"
        self.id = convert.answer_id(prefix, body.request_id, request)
        granularities = getattr(body, "timestamp_granularities", [])
        self._with_words = "word" in granularities
        self._with_segments = granularities != ["word"]
        self._check_form(granularities)
        if body.language is not None:
            self.speech.validate_language(body.language)
        self._config = self.speech.config(task)
        self._created = int(time.time())
        self._tallies: list[Tally] = []
        self._wanted = self._transcription_params()
        # Wrong values are refused before anything is decoded.
        self._wanted.attempt(state.engine.model, self._wanted.temperatures[0])

    def _check_form(self, granularities: Sequence[str]) -> None:
        """Refuse what the answer's form cannot hold, or the model cannot give."""
        body, form = self.body, self.body.response_format
        if granularities and form != "verbose_json":
            raise RequestError(
                f"timestamp_granularities[] = {granularities}: only with response_format verbose_json",
                param="timestamp_granularities[]",
            )
        if form in ("verbose_json", "srt", "vtt") and not self.speech.segment_timestamps:
            raise UnsupportedFeature(
                f"response_format = {form!r}: this model has no timestamps (its class has no tokens for "
                f"them, or its generation_config.json suppresses all); must be json or text",
                param="response_format",
            )
        if self._with_words and not self.speech.word_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities[] = 'word': this model has no timestamps of words; must be segment",
                param="timestamp_granularities[]",
            )
        if body.stream and form not in ("json", "text"):
            raise RequestError(
                f"response_format = {form!r}: must be json or text with stream",
                param="response_format",
            )
        if body.stream and len(body.temperatures or ()) > 1:
            raise RequestError(
                "temperature[]: one value with stream, which cannot take text back",
                param="temperature[]",
            )
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(body, name) and not body.stream:
                raise RequestError(f"{name}: only with stream", param=name)

    # ---- in one piece

    async def whole(self) -> BaseModel | str:
        """The answer in one piece: a model of JSON, or text."""
        audio, form = await self._decode(), self.body.response_format
        found = await self.state.engine.transcribe(
            audio, self._wanted, self._engine_id(), generate=self._run
        )
        usage = AudioUsage(seconds=math.ceil(audio.seconds))
        match form:
            case "json":
                return Transcription(text=found.text, usage=usage)
            case "verbose_json":
                return self._verbose(found, usage)
            case "srt":
                return found.srt()
            case "vtt":
                return found.vtt()
        return found.text

    def _verbose(self, found: Transcript, usage: AudioUsage) -> VerboseTranscription:
        return VerboseTranscription(
            task=found.task,
            language=found.language,
            duration=found.duration,
            text=found.text,
            segments=found.segments if self._with_segments else None,
            words=found.words,
            usage=usage,
        )

    # ---- as a stream

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        audio = await self._decode()
        said, reason = list[str](), "stop"
        pieces = self.state.engine.stream_transcript(
            audio, self._wanted, self._engine_id(), generate=self._run
        )
        try:
            async for text, finish_reason in pieces:
                if finish_reason == "length":
                    reason = "length"
                if text:
                    said.append(text)
                    yield event(self._chunk(text, audio))
        finally:
            await close(pieces)
        yield event(self._end("".join(said), reason, audio))
        if self.body.stream_include_usage or self.state.settings.enable_force_include_usage:
            yield event(self._wrap([], audio, counted=True))

    def _chunk(self, text: str, audio: AudioClip) -> SpeechChunk:
        counted = self.body.stream_continuous_usage_stats
        chunk = self._wrap([ChunkChoice(ChunkDelta(text))], audio, counted=counted)
        chunk.type, chunk.delta = "transcript.text.delta", text
        return chunk

    def _end(self, text: str, reason: str, audio: AudioClip) -> SpeechChunk:
        counted = self.body.stream_continuous_usage_stats
        chunk = self._wrap([ChunkChoice(ChunkDelta(""), reason)], audio, counted=counted)
        chunk.type, chunk.text = "transcript.text.done", text
        return chunk

    def _wrap(self, choices: list[ChunkChoice], audio: AudioClip, *, counted: bool) -> SpeechChunk:
        kind = "transcription.chunk" if self._task == "transcribe" else "translation.chunk"
        usage = self._usage(audio).model_dump() if counted else UNSET
        return SpeechChunk(
            self.id, kind, self._created, self.state.engine.model.name, choices, usage=usage
        )

    def _usage(self, audio: AudioClip) -> Usage:
        """Tokens so far; those of the audio by the model's estimate, if it has one."""
        estimate = self.speech.num_audio_tokens(audio.seconds, self._task)
        prompt = sum(t.num_prompt_tokens for t in self._tallies) if estimate is None else estimate
        generated = sum(t.num_output_tokens for t in self._tallies)
        return Usage(
            prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated
        )

    # ---- both

    async def _decode(self) -> AudioClip:
        upload = self._upload
        audio = await self.speech.decode(
            upload.data, name=upload.name, sample_rate=self._config.sample_rate
        )
        self._upload = upload._replace(data=b"")  # megabytes, while the answer is made
        return audio

    def _transcription_params(self) -> TranscriptionParams:
        """The form's fields; those that it leaves out are the model's defaults."""
        body, form = self.body, self.body.response_format
        sampling: dict[str, Any] = {
            k: getattr(body, k) for k in _COPIED if k in body.model_fields_set
        }
        sampling["max_tokens"] = body.max_completion_tokens
        if isinstance(body, TranscriptionRequest):
            xargs = {**(body.vllm_xargs or {}), **(body.headrace_xargs or {})}
            sampling["extra_args"] = xargs or None
        return TranscriptionParams(
            task=self._task,
            language=body.language,
            to_language=body.to_language,
            prompt=body.prompt,
            timestamps=form in ("verbose_json", "srt", "vtt"),
            words=self._with_words,
            tell_silence=form == "verbose_json",
            temperatures=body.temperatures
            or (FALLBACK_TEMPERATURES if body.temperature == 0 else [body.temperature]),
            sampling=sampling,
        )

    def _run(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Give a request to the engine, and count its outputs."""
        log_request(self.state, request_id, params, prompt)
        tally = Tally(self.state.metrics, params)
        self._tallies.append(tally)
        return _counted(self.state.engine.generate(prompt, params, request_id), tally)

    def _engine_id(self) -> str:
        return convert.engine_id(self.id, 0)


async def _counted(
    outputs: AsyncIterator[RequestOutput], tally: Tally
) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            tally.count(output)
            yield output
    finally:
        await close(outputs)
