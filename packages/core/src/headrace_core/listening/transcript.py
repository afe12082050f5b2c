"""What is wanted of a recording, and what is made of it: text, segments and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_core.listening.joining import joined
from headrace_core.listening.subtitles import srt, vtt
from headrace_core.listening.timed import Segment, Word
from headrace_core.speech import SpeechTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is wanted of all clips of a recording."""

    task: SpeechTask
    language: str | None
    """What is spoken; None: unknown."""
    to_language: str | None = None
    prompt: str = ""
    """Text that came before, or that shows the style."""
    timestamps: bool = False
    """Whether the model is to say times."""
    words: bool = False
    """Whether words are aligned."""
    tell_silence: bool = False
    """Whether each clip is asked if anybody speaks, not only those whose text is improbable."""

    @property
    def written(self) -> str | None:
        """The language of the text; None: unknown, as a translation says only what it is not in."""
        return self.to_language or (self.language if self.task == "transcribe" else None)


@dataclass(slots=True)
class Part:
    """What a clip came to."""

    text: str
    segments: Sequence[Segment] = ()
    """Their ids count from the clip's beginning, their times from the recording's."""
    words: Sequence[Word] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """A recording written down, in the fields of OpenAI's ``verbose_json``."""

    task: SpeechTask
    language: str | None
    """What is spoken, an ISO 639 code; None: nobody said, and the model cannot tell."""
    duration: float
    """Seconds."""
    text: str
    segments: list[Segment] | None = None
    """None: the model was not asked for times."""
    words: list[Word] | None = None
    """None: they were not asked for."""

    def srt(self) -> str:
        """The segments as a SubRip file. Raises: ValueError, there are none."""
        return srt(self._timed())

    def vtt(self) -> str:
        """The segments as a WebVTT file. Raises: ValueError, there are none."""
        return vtt(self._timed())

    def _timed(self) -> list[Segment]:
        if self.segments is None:
            raise ValueError("segments = None: subtitles are made of a transcript with segments")
        return self.segments


def transcript(parts: Sequence[Part], task: Task, seconds: float) -> Transcript:
    """The parts of a recording, in order, as one.

    Args:
        seconds: length of the recording.
    """
    segments = [segment for part in parts for segment in part.segments]
    return Transcript(
        task=task.task,
        language=task.language,
        duration=round(seconds, 2),
        text=joined([part.text for part in parts], task.written),
        segments=[replace(s, id=i) for i, s in enumerate(segments)] if task.timestamps else None,
        words=[word for part in parts for word in part.words] if task.words else None,
    )
