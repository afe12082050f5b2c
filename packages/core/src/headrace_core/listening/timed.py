"""What was said when. Times are seconds from the recording's beginning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech, about a sentence."""

    id: int
    seek: int
    """Where its clip begins, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    """Of the tokens of its clip, the end included."""
    compression_ratio: float | None
    """Of its clip's text; high where the model repeats itself."""
    no_speech_prob: float | None
    """None: the model does not say."""


@dataclass(frozen=True, slots=True)
class Word:
    """When a word was spoken."""

    word: str
    start: float
    end: float
