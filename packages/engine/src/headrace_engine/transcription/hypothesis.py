"""Clips of a recording, and attempts at their text."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from headrace_core.output import CompletionOutput
from headrace_core.speech.model import AudioClip


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip and its place in the audio."""

    audio: AudioClip
    index: int
    start: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An attempt at a clip's text."""

    clip: Clip
    text: str
    token_ids: Sequence[int]
    """End tokens left out."""
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None
    """None: the model does not say, or it was not asked."""


def placed(parts: Sequence[AudioClip]) -> Iterator[Clip]:
    """The clips of a recording, in order."""
    start = 0.0
    for index, part in enumerate(parts):
        yield Clip(part, index, start)
        start += part.seconds


def hypothesis(
    clip: Clip,
    part: CompletionOutput,
    *,
    temperature: float,
    no_speech_prob: float | None,
    eos_token_ids: Collection[int],
) -> Hypothesis:
    """The attempt that a completion is."""
    mean = None
    if part.cumulative_logprob is not None:
        mean = part.cumulative_logprob / max(1, len(part.token_ids))
    return Hypothesis(
        clip=clip,
        text=part.text,
        token_ids=[token for token in part.token_ids if token not in eos_token_ids],
        temperature=temperature,
        avg_logprob=mean,
        compression_ratio=compression_ratio(part.text),
        no_speech_prob=no_speech_prob,
    )


def compression_ratio(text: str) -> float:
    """The factor by which zlib makes a text smaller; 1 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 1.0
