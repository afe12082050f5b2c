"""One call of a speech route: upload -> clips -> engine requests -> the answer in the form asked for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from msgspec import UNSET
from pydantic import BaseModel

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.speech import AudioClip, SpeechModel, SpeechTask
from headrace_server import convert
from headrace_server.counting import Tally
from headrace_server.protocol.usage import Usage
from headrace_server.request_log import log_request
from headrace_server.speech.clips import LADDER, Clip, Heard, Listener, Task
from headrace_server.speech.joining import Joiner, joined
from headrace_server.speech.protocol import (
    AudioUsage,
    ChunkChoice,
    ChunkDelta,
    Segment,
    SpeechChunk,
    SpeechRequest,
    Transcription,
    TranscriptionRequest,
    VerboseTranscription,
    Word,
)
from headrace_server.speech.segments import spans
from headrace_server.speech.subtitles import srt, vtt
from headrace_server.speech.upload import Upload
from headrace_server.speech.words import TokenWord, words_of
from headrace_server.state import ServerState
from headrace_server.stream import Events, close, event

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Clips of one request that the engine has at a time."""
LONG = 10
"""Clips from which on progress is logged."""
_SUBTITLES: Mapping[str, Callable[[list[Segment]], str]] = {"srt": srt, "vtt": vtt}
_HEAVY = 1 << 16
"""Cost of looking through long audio, or of aligning; more than is done on the event loop."""
_COPIED = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip
_BROKEN = "\N{REPLACEMENT CHARACTER}"

T = TypeVar("T")


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
        self._listener = Listener(state.engine, self._run, self._params, temperatures)
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
                f"response_format = {form!r}: this model gives no times; must be json or text",
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
        audio = await self._decode()
        timed = self.body.response_format in ("verbose_json", "srt", "vtt")
        task = await self._plan(audio, timestamps=timed, tell_silence=self._is_verbose)
        heard = await self._hear_all(audio, task)
        text = joined([h.text for h in heard], task.to_language or task.language)
        usage = AudioUsage(seconds=math.ceil(audio.seconds))
        if not timed:
            return (
                text
                if self.body.response_format == "text"
                else Transcription(text=text, usage=usage)
            )
        segments = await self._segments(heard)
        if not self._is_verbose:
            return _SUBTITLES[self.body.response_format](segments)
        return VerboseTranscription(
            task=self._task,
            language=task.language,
            duration=round(audio.seconds, 2),
            text=text,
            segments=segments if self._with_segments else None,
            words=await self._words(heard, task) if self._with_words else None,
            usage=usage,
        )

    @property
    def _is_verbose(self) -> bool:
        return self.body.response_format == "verbose_json"

    async def _hear_all(self, audio: Audio, task: Task) -> list[Heard]:
        """All clips, some at a time; in order."""
        progress = _Progress(self.id, audio)
        places = asyncio.Semaphore(AT_ONCE)

        async def hear(clip: Clip) -> Heard:
            async with places:
                heard = await self._listener.hear(clip, task)
            progress.done(clip)
            return heard

        return await _together([hear(clip) for clip in audio.clips])

    async def _segments(self, heard: Sequence[Heard]) -> list[Segment]:
        found: list[Segment] = []
        for h in heard:
            for span in spans(h.token_ids, self.speech.timestamp, h.clip.audio.seconds):
                text = await self._text(span.text_tokens)
                found.append(
                    Segment(
                        id=len(found),
                        seek=round(h.clip.start * 100),
                        start=round(h.clip.start + span.start, 3),
                        end=round(h.clip.start + span.end, 3),
                        text=text,
                        tokens=span.tokens,
                        temperature=h.temperature,
                        avg_logprob=h.avg_logprob,
                        compression_ratio=h.compression_ratio,
                        no_speech_prob=h.no_speech_prob,
                    )
                )
        return found

    async def _words(self, heard: Sequence[Heard], task: Task) -> list[Word]:
        words = await _together([self._words_of(h, task) for h in heard])
        return [word for of_clip in words for word in of_clip]

    async def _words_of(self, heard: Heard, task: Task) -> list[Word]:
        """When a clip's words were spoken, by which part of it each token attends to."""
        tokens = [t for t in heard.token_ids if self.speech.timestamp(t) is None]
        if not tokens:
            return []
        plain = self.speech.prompt(heard.clip.audio, language=task.language, task=task.task)
        # The end token is aligned, too: where it begins the last word ends.
        sequence = [*tokens, *self.state.engine.model.eos_token_ids[:1]]
        weights = await self.state.engine.align(
            self.speech.continued(plain, sequence), self._engine_id()
        )
        times = await self.state.off_loop(
            _HEAVY, self.speech.token_times, weights, len(sequence), heard.clip.audio.seconds
        )
        start = heard.clip.start
        times = [
            *(round(start + time, 2) for time in times),
            round(start + heard.clip.audio.seconds, 2),
        ]
        return [
            Word(word=word.text.strip(), start=times[word.begin], end=times[word.end])
            for word in words_of(await self._pieces(tokens), task.language)
        ]

    async def _pieces(self, tokens: Sequence[int]) -> list[TokenWord]:
        """Tokens with their texts; those that share a character together."""
        found, begin = list[TokenWord](), 0
        for end in range(1, len(tokens) + 1):
            text = await self._text(tokens[begin:end])
            if not text.endswith(_BROKEN) or end == len(tokens):
                found.append(TokenWord(text, begin, end))
                begin = end
        return found

    async def _text(self, tokens: Sequence[int]) -> str:
        return await self.state.engine.detokenize(tokens, skip_special_tokens=True)

    # ---- as a stream

    async def events(self) -> Events:
        """The answer as server-sent events, the terminal one left out."""
        audio = await self._decode()
        task = await self._plan(audio, timestamps=False, tell_silence=False)
        joiner, said, reason = Joiner(task.to_language or task.language), list[str](), "stop"
        async for index, part in self._in_order(audio, task):
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

    async def _in_order(
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
        parts = await self.state.off_loop(_HEAVY, self.speech.split, whole, config)
        return Audio(list(_placed(parts)), whole.seconds)

    async def _plan(self, audio: Audio, *, timestamps: bool, tell_silence: bool) -> Task:
        """The language, found out if the client does not say, and what follows from the form."""
        body = self.body
        language = body.language or await self._listener.language(audio.clips[0])
        return Task(
            task=self._task,
            language=self.speech.validate_language(language),
            to_language=body.to_language,
            prompt=body.prompt,
            timestamps=timestamps,
            tell_silence=tell_silence,
        )

    def _params(self, temperature: float) -> SamplingParams:
        """Sampling parameters of one attempt; what the form leaves out is the model's default."""
        body, model = self.body, self.state.engine.model
        values = {k: v for k, v in model.default_sampling_params.items() if k != "max_tokens"}
        given = {k: getattr(body, k) for k in _COPIED if k in body.model_fields_set}
        cap, wanted = model.default_sampling_params.get("max_tokens"), body.max_completion_tokens
        limits = [limit for limit in (cap, wanted) if limit is not None]
        xargs: Mapping[str, Any] = {}
        if isinstance(body, TranscriptionRequest):
            xargs = {**(body.vllm_xargs or {}), **(body.headrace_xargs or {})}
        return SamplingParams.from_optional(
            **{**values, **given, "temperature": temperature},
            max_tokens=min(limits, default=None),
            logprobs=None if body.stream else 0,
            extra_args=dict(xargs) or None,
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

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


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _placed(parts: Sequence[AudioClip]) -> Iterator[Clip]:
    start = 0.0
    for index, part in enumerate(parts):
        yield Clip(part, index, start)
        start += part.seconds


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
