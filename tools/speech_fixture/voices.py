"""Spoken words, by espeak-ng."""

from __future__ import annotations

import io
import random
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

RATE = 16_000
SECONDS = 4
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "yes", "no",
    "stop", "go", "left", "right", "open", "water",
)  # fmt: skip
VOICES = ("en-us", "en-gb", "en-us+m1", "en-us+m3", "en-us+f1", "en-us+f3", "en-gb+m2", "en-gb+f2")
HELD_OUT = ("en-us+m2", "en-us+f2", "en-gb+m3")
"""Not trained with."""


class Utterance(NamedTuple):
    """What somebody said."""

    text: str
    samples: npt.NDArray[np.float32]


def spoken(seed: int, count: int, voices: Sequence[str]) -> list[Utterance]:
    """Utterances of one to five words, no longer than a clip."""
    draw, found = random.Random(seed), list[Utterance]()
    while len(found) < count:
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))
        samples = _say(text, draw.choice(voices), draw.randint(130, 190), draw.randint(30, 70))
        if len(samples) <= SECONDS * RATE:
            found.append(Utterance(text, samples))
    return found


def _say(text: str, voice: str, words_a_minute: int, pitch: int) -> npt.NDArray[np.float32]:
    command = [
        "espeak-ng",
        "-v",
        voice,
        "-s",
        str(words_a_minute),
        "-p",
        str(pitch),
        "--stdout",
        text,
    ]
    wav = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    resampled: npt.NDArray[np.float32] = soxr.resample(samples, rate, RATE)
    loud = np.flatnonzero(np.abs(resampled) > 1e-3)
    return resampled[loud[0] : loud[-1] + 1] if len(loud) else resampled
