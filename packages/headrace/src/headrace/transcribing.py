"""Recordings written down offline, as :meth:`headrace.LLM.transcribe` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from headrace.progress import AudioBar, audio_bar
from headrace.recordings import Recording, read_ahead
from headrace.stepping import OfflineSteps
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.listening.clips import LADDER, Listener, attempt_params
from headrace_core.listening.heard import Clip, placed
from headrace_core.listening.transcript import Part, Task, Transcript, transcript
from headrace_core.sampling import SamplingParams
from headrace_core.speech import AudioClip, SpeechModel, SpeechTask

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
class Wanted:
    """What a call asks for.

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
        return [float(self.temperature)] if self.temperature else LADDER

    def segments(self, speech: SpeechModel) -> bool:
        """Whether the model is asked for times. Raises: UnsupportedFeature, it has none."""
        if self.timestamps is None:
            return speech.segment_timestamps
        if "segment" in self.timestamps and not speech.segment_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities: this model gives no times of segments (its class has no "
                "tokens for them, or its generation_config.json suppresses all)",
                param="timestamp_granularities",
            )
        return "segment" in self.timestamps

    def words(self, speech: SpeechModel) -> bool:
        """Whether words are aligned. Raises: UnsupportedFeature, the model does not align."""
        wanted = self.timestamps is not None and "word" in self.timestamps
        if wanted and not speech.word_timestamps:
            raise UnsupportedFeature(
                "timestamp_granularities: this model does not tell when words are spoken",
                param="timestamp_granularities",
            )
        return wanted


def _is_temperature(given: Any) -> bool:
    return not isinstance(given, bool) and isinstance(given, Real) and 0 <= float(given) <= 1


@dataclass
class _Sheet:
    """A recording's transcript as far as it is written."""

    task: Task
    seconds: float
    parts: list[Part]

    def whole(self) -> Transcript:
        return transcript(self.parts, self.task, self.seconds)


class OfflineListening:
    """Hears recordings with a model that transcribes.

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
        wanted: Wanted,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[Transcript]:
        """One transcript for each recording, in order.

        Raises:
            OSError, RequestError: a recording or a value is wrong; nothing is left running.
            GenerateError: a clip failed.
        """
        task, listener = self._task(wanted), self._listener(wanted)
        rate, sheets = self._speech.config(wanted.task).sample_rate, list[_Sheet]()
        with (
            audio_bar(use_tqdm) as bar,
            OfflineSteps(self._engine) as steps,
            closing(read_ahead(recordings, self._decoder, rate)) as whole,
        ):
            for audio in whole:
                bar.add(audio.seconds)
                clips = self._clips(audio, wanted.task)
                language = task.language or steps.result(listener.language(clips[0]))
                spoken = replace(task, language=self._speech.validate_language(language))
                sheets.append(_Sheet(spoken, audio.seconds, [Part("")] * len(clips)))
                for clip in clips:
                    while steps.num_running >= AT_ONCE:
                        steps.advance()
                    steps.start(listener.part(clip, spoken), _written(sheets[-1], clip, bar))
            steps.finish()
        return [sheet.whole() for sheet in sheets]

    def _clips(self, audio: AudioClip, task: SpeechTask) -> list[Clip]:
        return list(placed(self._speech.split(audio, self._speech.config(task))))

    def _task(self, wanted: Wanted) -> Task:
        segments = wanted.segments(self._speech)
        return Task(
            task=wanted.task,
            language=self._speech.validate_language(wanted.language),
            to_language=wanted.to_language,
            prompt=wanted.prompt,
            timestamps=segments,
            words=wanted.words(self._speech),
            tell_silence=segments,
        )

    def _listener(self, wanted: Wanted) -> Listener:
        model = self._engine.model

        def params(temperature: float) -> SamplingParams:
            return attempt_params(model, temperature, wanted.sampling)

        params(0.0).validate()
        return Listener(self._speech, model, params, wanted.temperatures)


def _written(sheet: _Sheet, clip: Clip, bar: AudioBar) -> Callable[[Part], None]:
    """Notes what a clip came to."""

    def note(part: Part) -> None:
        sheet.parts[clip.index] = part
        bar.heard(clip.audio.seconds)

    return note
