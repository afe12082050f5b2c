"""Whole recordings, transcribed by an asynchronous engine: clips run side by side."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from headrace_core.errors import UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_engine.pooling.bounded import run_bounded
from headrace_engine.transcription.calls import StreamedClipRequests, close
from headrace_engine.transcription.hypothesis import Clip, placed
from headrace_engine.transcription.joining import Joiner
from headrace_engine.transcription.parts import TranscriptPart, transcript
from headrace_engine.transcription.transcriber import Transcriber, find_language

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Clips of one recording that the engine has at a time."""
LONG = 10
"""Number of clips from which on progress is logged."""


class TranscribingEngine(Protocol):
    """Facts about an engine that transcribes."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def speech(self) -> SpeechModel | None: ...


class RecordingTask:
    """Transcribes one recording: either :meth:`whole` or :meth:`pieces`, once.

    Args:
        engine: knows the model.
        calls: what runs the requests.
        audio: the recording, decoded.
        request_id: shown in the log.

    Raises:
        UnsupportedFeature: the model does not transcribe.
    """

    def __init__(
        self,
        engine: TranscribingEngine,
        calls: StreamedClipRequests,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
    ) -> None:
        self._speech = need_speech(engine.speech, engine.model)
        self._model = engine.model
        self._calls = calls
        self._audio = audio
        self._params = params
        self._request_id = request_id

    async def whole(self) -> Transcript:
        """The transcript; see :meth:`headrace_core.engine.EngineClient.transcribe`."""
        clips, params = await self._prepare()
        transcriber = self._transcriber(params)
        progress = _Progress(self._request_id, clips, self._audio.seconds)
        parts: dict[int, TranscriptPart] = {}

        async def run(clip: Clip) -> TranscriptPart:
            part = await transcriber.part(clip)
            progress.done(clip)
            return part

        await run_bounded(map(run, clips), AT_ONCE, parts.__setitem__)
        every = [parts[clip.index] for clip in clips]
        return transcript(every, params, self._audio.seconds)

    async def pieces(self) -> AsyncGenerator[TranscriptPiece, None]:
        """The text, piece by piece; see
        :meth:`headrace_core.engine.EngineClient.stream_transcript`."""
        clips, params = await self._prepare()
        joiner = Joiner(params.written)
        async with aclosing(self._outputs(clips, params)) as outputs:
            async for begins, part in outputs:
                if begins:
                    joiner.next_clip()
                text = joiner.add(part.text)
                if text or part.finish_reason is not None:
                    yield TranscriptPiece(text, part.finish_reason)

    async def _prepare(self) -> tuple[list[Clip], TranscriptionParams]:
        """The clips, and the parameters with the language."""
        params, speech = self._params, self._speech
        config = speech.config(params.task)
        parts = await self._calls.compute(lambda: speech.split(self._audio, config))
        clips, language = list(placed(parts)), params.language
        if language is None:
            language = await find_language(self._calls, speech, clips[0])
        return clips, replace(params, language=speech.validate_language(language))

    async def _outputs(
        self, clips: Sequence[Clip], params: TranscriptionParams
    ) -> AsyncGenerator[tuple[bool, CompletionOutput], None]:
        """Outputs of all clips, clip by clip, each with whether its clip begins. Later clips run
        meanwhile: the engine merges outputs that nobody has fetched."""
        transcriber = self._transcriber(params)
        sampling = params.attempt(self._model, params.temperatures[0], streamed=True)
        progress = _Progress(self._request_id, clips, self._audio.seconds)
        waiting, running = iter(clips), list[_Started]()

        def start() -> None:
            for clip in itertools.islice(waiting, AT_ONCE - len(running)):
                outputs = self._calls.start(transcriber.prompt(clip), sampling)
                running.append(_Started(clip, outputs))

        try:
            start()
            while running:
                begins = True
                async for output in running[0]:
                    yield begins, output.outputs[0]
                    begins = False
                progress.done(running.pop(0).clip)
                start()
        finally:
            for started in running:
                await started.aclose()

    def _transcriber(self, params: TranscriptionParams) -> Transcriber:
        return Transcriber(self._calls, self._speech, self._model, params)


def need_speech(speech: SpeechModel | None, model: ServedModel) -> SpeechModel:
    """An engine's speech model.

    Raises:
        UnsupportedFeature: the model does not transcribe; says why, where that is known.
    """
    if speech is not None and "transcription" in model.tasks:
        return speech
    why = "".join(f"; {reason}" for reason in model.unmet.get("transcription", ()))
    raise UnsupportedFeature(f"{model.name}: does not transcribe{why}", param="model")


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
        """Abort the request."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await close(self._outputs)


class _Progress:
    """Log lines of a long recording: every tenth of it."""

    def __init__(self, name: str, clips: Sequence[Clip], seconds: float) -> None:
        self._name = name
        self._total = len(clips)
        self._seconds = seconds
        self._done = 0
        self._done_seconds = 0.0

    def done(self, clip: Clip) -> None:
        """Count a clip."""
        before, self._done = self._done * 10 // self._total, self._done + 1
        self._done_seconds += clip.audio.seconds
        if self._total >= LONG and self._done * 10 // self._total > before:
            logger.info(
                "%s: %d of %d clips transcribed, %.0f of %.0f seconds",
                self._name, self._done, self._total, self._done_seconds, self._seconds,
            )  # fmt: skip
