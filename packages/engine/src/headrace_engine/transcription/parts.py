"""The parts of a transcript, one for each clip, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_core.speech.transcription import Segment, Transcript, TranscriptionParams, Word
from headrace_engine.transcription.joining import joined


@dataclass(slots=True)
class TranscriptPart:
    """The transcript of a clip."""

    text: str
    segments: Sequence[Segment] = ()
    """Their ids count from the clip's beginning, their times from the recording's."""
    words: Sequence[Word] = ()


def transcript(
    parts: Sequence[TranscriptPart], params: TranscriptionParams, seconds: float
) -> Transcript:
    """The parts of a recording, in order, as one.

    Args:
        params: with the language that was found out.
        seconds: length of the recording.
    """
    segments = [segment for part in parts for segment in part.segments]
    timed = [replace(segment, id=index) for index, segment in enumerate(segments)]
    return Transcript(
        task=params.task,
        language=params.language,
        duration=round(seconds, 2),
        text=joined([part.text for part in parts], params.written),
        segments=timed if params.timestamps else None,
        words=[word for part in parts for word in part.words] if params.words else None,
    )
