"""A transcription without rules, for tests of whatever calls an engine's.

Each clip is one request, and its reply is the clip's text: no second attempts, one segment for a clip,
words that share a clip evenly. A language that is not given is the first that the model's probe knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import NamedTuple

from headrace_core.engine import Generate
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import (
    Segment,
    Transcript,
    TranscriptionParams,
    TranscriptPiece,
    Word,
)


class _Clip(NamedTuple):
    audio: AudioClip
    number: int
    start: float


class FakeTranscription:
    """Transcribes one recording.

    Args:
        speech, model: the engine's.
        generate: runs a request for each clip; the ids are ``request_id`` and a number.
    """

    def __init__(
        self,
        speech: SpeechModel,
        model: ServedModel,
        generate: Generate,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
    ) -> None:
        self._speech = speech
        self._model = model
        self._generate = generate
        self._audio = audio
        self._request_id = request_id
        self._clips: list[_Clip] = []
        start = 0.0
        for number, clip in enumerate(speech.split(audio, speech.config(params.task))):
            self._clips.append(_Clip(clip, number, start))
            start += clip.seconds
        probe = speech.language_probe(self._clips[0].audio)
        if params.language is None and probe is not None:
            params = replace(params, language=next(iter(probe.languages.values())))
        self._params = params

    async def whole(self) -> Transcript:
        """All clips, which run side by side."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._final(clip)) for clip in self._clips]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finals, params = [task.result() for task in tasks], self._params
        texts = [final.outputs[0].text.strip() for final in finals]
        return Transcript(
            task=params.task,
            language=params.language,
            duration=round(self._audio.seconds, 2),
            text=" ".join(texts),
            segments=list(map(self._segment, self._clips, finals)) if params.timestamps else None,
            words=[word for clip, text in zip(self._clips, texts) for word in _words(clip, text)]
            if params.words
            else None,
        )

    async def pieces(self) -> AsyncGenerator[TranscriptPiece, None]:
        """The clips' deltas in order, with a space between clips; all run side by side."""
        streams = [self._generate(*self._request(clip, streamed=True)) for clip in self._clips]
        firsts = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
        try:
            for clip, stream, first in zip(self._clips, streams, firsts, strict=True):
                space, output = " " if clip.number else "", await first
                while output is not None:
                    (part,) = output.outputs
                    yield TranscriptPiece(space + part.text, part.finish_reason)
                    space, output = "", await anext(stream, None)
        finally:
            for first in firsts:
                first.cancel()
            await asyncio.gather(*firsts, return_exceptions=True)
            for stream in streams:
                aclose = getattr(stream, "aclose", None)
                if aclose is not None:
                    await aclose()

    async def _final(self, clip: _Clip) -> RequestOutput:
        last = None
        async for output in self._generate(*self._request(clip, streamed=False)):
            last = output
        assert last is not None
        return last

    def _request(self, clip: _Clip, *, streamed: bool) -> tuple[Prompt, SamplingParams, str]:
        params = self._params
        prompt = self._speech.prompt(
            clip.audio,
            language=params.language,
            task=params.task,
            request_prompt=params.prompt,
            to_language=params.to_language,
            timestamps=params.timestamps,
        )
        sampling = params.attempt(self._model, params.temperatures[0], streamed=streamed)
        return prompt, sampling, f"{self._request_id}-{clip.number}"

    def _segment(self, clip: _Clip, final: RequestOutput) -> Segment:
        (part,) = final.outputs
        return Segment(
            id=clip.number,
            seek=round(clip.start * 100),
            start=clip.start,
            end=clip.start + clip.audio.seconds,
            text=part.text,
            tokens=part.token_ids,
            temperature=self._params.temperatures[0],
            avg_logprob=-0.5,
            compression_ratio=1.0,
            no_speech_prob=None,
        )


def _words(clip: _Clip, text: str) -> list[Word]:
    words = text.split()
    share = clip.audio.seconds / max(1, len(words))
    return [
        Word(word, clip.start + index * share, clip.start + (index + 1) * share)
        for index, word in enumerate(words)
    ]
