"""Transcripts of recordings. Times are seconds from the recording's beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any, NamedTuple

from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import SpeechTask

FALLBACK_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures to try in turn where the caller asks for 0 or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionParams:
    """Parameters of :meth:`headrace_core.engine.EngineClient.transcribe`."""

    task: SpeechTask
    language: str | None = None
    """The spoken language; None: the model finds it out, if it can."""
    to_language: str | None = None
    prompt: str = ""
    """Preceding text, or an example of the style."""
    timestamps: bool = False
    """Cut the text into segments with times."""
    words: bool = False
    """Align words."""
    tell_silence: bool = False
    """Ask for each clip if anybody speaks, not only where its text is improbable."""
    temperatures: Sequence[float] = FALLBACK_TEMPERATURES
    """To try in turn until a clip's text looks right."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of :class:`SamplingParams`; the model's defaults fill the rest."""

    @property
    def written(self) -> str | None:
        """The language of the text; None: unknown, as for a translation without ``to_language``."""
        return self.to_language or (self.language if self.task == "transcribe" else None)

    def attempt(
        self, model: ServedModel, temperature: float, *, streamed: bool = False
    ) -> SamplingParams:
        """Sampling parameters of one attempt at a clip; the smaller of two ``max_tokens`` counts.

        Args:
            streamed: the outputs are deltas, and nobody judges the whole text.
        """
        defaults, given = model.default_sampling_params, self.sampling
        limits = [v for v in (defaults.get("max_tokens"), given.get("max_tokens")) if v is not None]
        values = {**defaults, **given, "temperature": temperature}
        values |= {"max_tokens": min(limits, default=None), "logprobs": None if streamed else 0}
        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        return SamplingParams.from_optional(**values, output_kind=kind, skip_clone=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech, about a sentence."""

    id: int
    seek: int
    """Begin of its clip, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    """Mean over the tokens of its clip, the end token included."""
    compression_ratio: float | None
    """Compression ratio of the clip's text; high where the model repeats itself."""
    no_speech_prob: float | None
    """None: the model does not say."""


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word and its times."""

    word: str
    start: float
    end: float


class TranscriptPiece(NamedTuple):
    """The next piece of a streamed transcript."""

    text: str
    finish_reason: str | None = None
    """Finish reason of a clip that ends here."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A recording written down."""

    task: SpeechTask
    language: str | None
    """ISO 639 code; None: not given, and the model cannot tell."""
    duration: float
    """Seconds."""
    text: str
    segments: list[Segment] | None = None
    """None: not asked for."""
    words: list[Word] | None = None
    """None: not asked for."""

    def srt(self) -> str:
        """The segments with text as a SubRip file. Raises: ValueError, there are no segments."""
        cues = enumerate(self._cues(",", str), 1)
        return "\n".join(f"{number}\n{cue}" for number, cue in cues)

    def vtt(self) -> str:
        """The same as WebVTT (https://www.w3.org/TR/webvtt1/), markup escaped."""
        return "\n".join(["WEBVTT\n", *self._cues(".", partial(escape, quote=False))])

    def _cues(self, point: str, show: Callable[[str], str]) -> Iterator[str]:
        if self.segments is None:
            raise ValueError("segments = None: subtitles are made of a transcript with segments")
        for s in self.segments:
            if text := show(_line(s.text)):
                yield f"{_time(s.start, point)} --> {_time(s.end, point)}\n{text}\n"


def _line(text: str) -> str:
    """A text that cannot be mistaken for a line of times, or for the end of its block."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
