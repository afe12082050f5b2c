"""Recordings written down offline, as :meth:`headrace.LLM.transcribe` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from headrace.offline.recordings import Recording, read_ahead
from headrace.progress import AudioBar, audio_bar
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.speech.model import AudioClip, SpeechModel, SpeechTask
from headrace_core.speech.transcription import (
    FALLBACK_TEMPERATURES,
    Transcript,
    TranscriptionParams,
)
from headrace_engine.transcription.hypothesis import Clip, placed
from headrace_engine.transcription.parts import TranscriptPart, transcript
from headrace_engine.transcription.transcriber import Transcriber, find_language

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine
    from headrace_multimodal.audio.decoding import AudioDecoder

AT_ONCE = 64
"""Clips that the engine has at a time: enough for large steps, and few beside hours of others."""
SAMPLING = (
    "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "max_tokens", "extra_args",
)  # fmt: skip
"""Further fields of :class:`~headrace.SamplingParams` that a call may set."""


@dataclass(frozen=True, kw_only=True)
class TranscriptionOptions:
    """Options of a transcription call.

    Args:
        timestamps: of ``segment`` and ``word``; None: segments, if the model tells times.
        temperature: 0: greedy, and again with up to 1 where the result looks wrong; several: tried
            one after the other.
        sampling: of :data:`SAMPLING`.

    Raises:
        TypeError: a field that a call may not set.
        RequestError: a value is wrong.
    """

    task: SpeechTask
    language: str | None = None
    to_language: str | None = None
    prompt: str = ""
    timestamps: Sequence[str] | None = None
    temperature: float | Sequence[float] = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sampling) - set(SAMPLING))
        if unknown:
            raise TypeError(f"unknown arguments {unknown}: must be of {', '.join(SAMPLING)}")
        if not isinstance(self.prompt, str):
            raise RequestError(f"prompt = {self.prompt!r:.100}: must be text", param="prompt")
        given = self.timestamps
        known = isinstance(given, Collection) and all(one in ("segment", "word") for one in given)
        if given is not None and (isinstance(given, str) or not known):
            raise RequestError(
                f"timestamp_granularities = {given!r}: must be of ['segment', 'word']",
                param="timestamp_granularities",
            )
        several = isinstance(self.temperature, Iterable)
        tried = list(self.temperature) if several else [self.temperature]  # type: ignore[arg-type]
        if not tried or not all(_is_temperature(one) for one in tried):
            raise RequestError(
                f"temperature = {self.temperature!r}: must be 0 to 1, one or several",
                param="temperature",
            )

    @property
    def temperatures(self) -> Sequence[float]:
        """In the order in which they are tried."""
        if isinstance(self.temperature, Iterable):
            return [float(one) for one in self.temperature]
        return [float(self.temperature)] if self.temperature else FALLBACK_TEMPERATURES

    def segments(self, speech: SpeechModel) -> bool:
        """True if the model is asked for times. Raises: UnsupportedFeature, it has none."""
        if self.timestamps is None:
            return speech.segment_timestamps
        if "segment" in self.timestamps and not speech.segment_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities: this model has no timestamps of segments (its class has no "
                "tokens for them, or its generation_config.json suppresses all)",
                param="timestamp_granularities",
            )
        return "segment" in self.timestamps

    def words(self, speech: SpeechModel) -> bool:
        """True if words are aligned. Raises: UnsupportedFeature, the model does not align."""
        wanted = self.timestamps is not None and "word" in self.timestamps
        if wanted and not speech.word_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities: this model has no timestamps of words",
                param="timestamp_granularities",
            )
        return wanted


def _is_temperature(given: Any) -> bool:
    return not isinstance(given, bool) and isinstance(given, Real) and 0 <= float(given) <= 1


@dataclass
class _Sheet:
    """A recording's transcript as far as it is written."""

    params: TranscriptionParams
    seconds: float
    parts: list[TranscriptPart]

    def whole(self) -> Transcript:
        return transcript(self.parts, self.params, self.seconds)


class OfflineTranscription:
    """Transcribes recordings.

    Args:
        engine: runs it.
        speech: the engine's.
        decoder: for files.
    """

    def __init__(self, engine: OfflineEngine, speech: SpeechModel, decoder: AudioDecoder) -> None:
        self._engine = engine
        self._speech = speech
        self._decoder = decoder

    def run(
        self,
        recordings: Sequence[Recording],
        wanted: TranscriptionOptions,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[Transcript]:
        """One transcript for each recording, in order.

        Raises:
            OSError, RequestError: a recording or a value is wrong; nothing is left running.
            GenerateError: a clip failed.
        """
        params, calls = self._params(wanted), self._engine.clip_requests()
        rate, sheets = self._speech.config(wanted.task).sample_rate, list[_Sheet]()
        with (
            audio_bar(use_tqdm) as bar,
            self._engine.stepper() as stepper,
            closing(read_ahead(recordings, self._decoder, rate)) as whole,
        ):
            for audio in whole:
                bar.add(audio.seconds)
                clips = self._clips(audio, wanted.task)
                language = params.language or stepper.result(
                    find_language(calls, self._speech, clips[0])
                )
                spoken = replace(params, language=self._speech.validate_language(language))
                transcriber = Transcriber(calls, self._speech, self._engine.model, spoken)
                sheets.append(_Sheet(spoken, audio.seconds, [TranscriptPart("")] * len(clips)))
                for clip in clips:
                    while stepper.num_running >= AT_ONCE:
                        stepper.advance()
                    stepper.start(transcriber.part(clip), _written(sheets[-1], clip, bar))
            stepper.finish()
        return [sheet.whole() for sheet in sheets]

    def _clips(self, audio: AudioClip, task: SpeechTask) -> list[Clip]:
        return list(placed(self._speech.split(audio, self._speech.config(task))))

    def _params(self, wanted: TranscriptionOptions) -> TranscriptionParams:
        segments = wanted.segments(self._speech)
        params = TranscriptionParams(
            task=wanted.task,
            language=self._speech.validate_language(wanted.language),
            to_language=wanted.to_language,
            prompt=wanted.prompt,
            timestamps=segments,
            words=wanted.words(self._speech),
            tell_silence=segments,
            temperatures=wanted.temperatures,
            sampling=wanted.sampling,
        )
        params.attempt(self._engine.model, 0.0)  # refuses a wrong value
        return params


def _written(sheet: _Sheet, clip: Clip, bar: AudioBar) -> Callable[[TranscriptPart], None]:
    """Notes what a clip came to."""

    def note(part: TranscriptPart) -> None:
        sheet.parts[clip.index] = part
        bar.advance(clip.audio.seconds)

    return note
