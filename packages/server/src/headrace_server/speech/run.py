"""One call of a speech route: upload -> clips -> engine requests -> the answer in the form asked for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from fastapi import Request
from msgspec import UNSET
from pydantic import BaseModel

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.listening.clips import LADDER, Listener, attempt_params
from headrace_core.listening.heard import Clip, placed
from headrace_core.listening.joining import Joiner
from headrace_core.listening.transcript import Part, Task, Transcript, transcript
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams
from headrace_core.speech import SpeechModel, SpeechTask
from headrace_server import convert
from headrace_server.counting import Tally
from headrace_server.protocol.usage import Usage
from headrace_server.request_log import log_request
from headrace_server.side_by_side import in_order
from headrace_server.speech.driving import HEAVY, Answers, drive
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
from headrace_server.stream import Events, close, event

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Clips of one request that the engine has at a time."""
LONG = 10
"""Clips from which on progress is logged."""
_COPIED = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


class Audio(NamedTuple):
    """A decoded upload."""

    clips: list[Clip]
    seconds: float


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
        convert.refuse_rank(request)
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
        self._numbers = itertools.count()
        self._tallies: list[Tally] = []
        temperatures = body.temperatures or (
            LADDER if body.temperature == 0 else [body.temperature]
        )
        self._listener = Listener(self.speech, state.engine.model, self._params, temperatures)
        self._answers = Answers(state.engine, state.off_loop, self._run, self._engine_id)
        self._params(temperatures[0]).validate()

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
                f"response_format = {form!r}: this model gives no times (its class has no tokens for "
                "them, or its generation_config.json suppresses all); must be json or text",
                param="response_format",
            )
        if self._with_words and not self.speech.word_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities[] = 'word': this model does not tell when words are "
                "spoken; must be segment",
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
        timed = form in ("verbose_json", "srt", "vtt")
        task = await self._plan(audio, timestamps=timed, words=self._with_words)
        found = transcript(await self._hear_all(audio, task), task, audio.seconds)
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

    async def _hear_all(self, audio: Audio, task: Task) -> list[Part]:
        """All clips, some at a time; in order."""
        progress = _Progress(self.id, audio)

        async def hear(_: int, clip: Clip) -> Part:
            part = await drive(self._listener.part(clip, task), self._answers)
            progress.done(clip)
            return part

        return await in_order(hear, audio.clips, AT_ONCE)

    # ---- as a stream

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        audio = await self._decode()
        task = await self._plan(audio, timestamps=False)
        joiner, said, reason = Joiner(task.written), list[str](), "stop"
        async with aclosing(self._parts(audio, task)) as parts:
            async for index, part in parts:
                if index is not None:
                    joiner.next_clip()
                if part.finish_reason == "length":
                    reason = "length"
                shown = joiner.add(part.text)
                if shown:
                    said.append(shown)
                    yield event(self._chunk(shown, audio))
        yield event(self._end("".join(said), reason, audio))
        if self.body.stream_include_usage or self.state.settings.enable_force_include_usage:
            yield event(self._wrap([], audio, counted=True))

    async def _parts(
        self, audio: Audio, task: Task
    ) -> AsyncGenerator[tuple[int | None, CompletionOutput], None]:
        """Outputs of all clips, clip by clip; the first of each with the clip's index. Later clips run
        meanwhile: the engine merges what nobody has fetched."""
        temperature = (self.body.temperatures or [self.body.temperature])[0]
        progress, running = _Progress(self.id, audio), list[_Started]()
        waiting = iter(audio.clips)

        def start() -> None:
            for clip in itertools.islice(waiting, AT_ONCE - len(running)):
                prompt = self._listener.prompt(clip, task)
                running.append(_Started(clip, self._run(prompt, self._params(temperature))))

        try:
            start()
            while running:
                index: int | None = running[0].clip.index
                async for output in running[0]:
                    yield index, output.outputs[0]
                    index = None
                progress.done(running.pop(0).clip)
                start()
        finally:
            for started in running:
                await started.aclose()

    def _chunk(self, text: str, audio: Audio) -> SpeechChunk:
        counted = self.body.stream_continuous_usage_stats
        chunk = self._wrap([ChunkChoice(ChunkDelta(text))], audio, counted=counted)
        chunk.type, chunk.delta = "transcript.text.delta", text
        return chunk

    def _end(self, text: str, reason: str, audio: Audio) -> SpeechChunk:
        counted = self.body.stream_continuous_usage_stats
        chunk = self._wrap([ChunkChoice(ChunkDelta(""), reason)], audio, counted=counted)
        chunk.type, chunk.text = "transcript.text.done", text
        return chunk

    def _wrap(self, choices: list[ChunkChoice], audio: Audio, *, counted: bool) -> SpeechChunk:
        kind = "transcription.chunk" if self._task == "transcribe" else "translation.chunk"
        usage = self._usage(audio).model_dump() if counted else UNSET
        return SpeechChunk(
            self.id, kind, self._created, self.state.engine.model.name, choices, usage=usage
        )

    def _usage(self, audio: Audio) -> Usage:
        """Tokens so far; those of the audio by the model's estimate, if it has one."""
        heard = self.speech.num_audio_tokens(audio.seconds, self._task)
        prompt = sum(t.num_prompt_tokens for t in self._tallies) if heard is None else heard
        generated = sum(t.num_output_tokens for t in self._tallies)
        return Usage(
            prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated
        )

    # ---- both

    async def _decode(self) -> Audio:
        upload, config = self._upload, self._config
        whole = await self.speech.decode(
            upload.data, name=upload.name, sample_rate=config.sample_rate
        )
        self._upload = upload._replace(data=b"")  # megabytes, while the answer is made
        parts = await self.state.off_loop(HEAVY, self.speech.split, whole, config)
        return Audio(list(placed(parts)), whole.seconds)

    async def _plan(self, audio: Audio, *, timestamps: bool, words: bool = False) -> Task:
        """The language, found out if the client does not say, and what follows from the form."""
        body, language = self.body, self.body.language
        if language is None:
            language = await drive(self._listener.language(audio.clips[0]), self._answers)
        return Task(
            task=self._task,
            language=self.speech.validate_language(language),
            to_language=body.to_language,
            prompt=body.prompt,
            timestamps=timestamps,
            words=words,
            tell_silence=body.response_format == "verbose_json",
        )

    def _params(self, temperature: float) -> SamplingParams:
        """Sampling parameters of one attempt; what the form leaves out is the model's default."""
        body = self.body
        given = {k: getattr(body, k) for k in _COPIED if k in body.model_fields_set}
        given["max_tokens"] = body.max_completion_tokens
        if isinstance(body, TranscriptionRequest):
            xargs = {**(body.vllm_xargs or {}), **(body.headrace_xargs or {})}
            given["extra_args"] = xargs or None
        return attempt_params(self.state.engine.model, temperature, given, streamed=body.stream)

    def _run(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Give a request to the engine, and count what it answers."""
        name = self._engine_id()
        log_request(self.state.settings, name, params, prompt)
        tally = Tally(self.state.metrics, params)
        self._tallies.append(tally)
        return _counted(self.state.engine.generate(prompt, params, name), tally)

    def _engine_id(self) -> str:
        return convert.engine_id(self.id, next(self._numbers))


class _Started(AsyncIterator[RequestOutput]):
    """A request that has begun, though nobody has asked for its first output yet."""

    def __init__(self, clip: Clip, outputs: AsyncIterator[RequestOutput]) -> None:
        self.clip = clip
        self._outputs = outputs
        self._first: asyncio.Future[RequestOutput | None] | None = asyncio.ensure_future(
            anext(outputs, None)
        )

    async def __anext__(self) -> RequestOutput:
        if self._first is None:
            return await self._outputs.__anext__()
        first, self._first = await self._first, None
        if first is None:
            raise StopAsyncIteration
        return first

    async def aclose(self) -> None:
        """Abort it."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await close(self._outputs)


async def _counted(
    outputs: AsyncIterator[RequestOutput], tally: Tally
) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            tally.count(output)
            yield output
    finally:
        await close(outputs)


class _Progress:
    """Log lines of a long file: every tenth of it."""

    def __init__(self, name: str, audio: Audio) -> None:
        self._name = name
        self._audio = audio
        self._done = 0
        self._seconds = 0.0

    def done(self, clip: Clip) -> None:
        """One more."""
        total = len(self._audio.clips)
        before, self._done = self._done * 10 // total, self._done + 1
        self._seconds += clip.audio.seconds
        if total >= LONG and self._done * 10 // total > before:
            logger.info(
                "%s: %d of %d clips heard, %.0f of %.0f seconds",
                self._name, self._done, total, self._seconds, self._audio.seconds,
            )  # fmt: skip
