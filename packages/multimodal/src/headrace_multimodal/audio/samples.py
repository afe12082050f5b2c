"""Blocks of decoded audio become one channel of one rate, within a limit. numpy and soxr only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

MAX_CHANNELS = 64
SOURCE_RATES = (1_000, 768_000)
"""Samples a second that are believed."""


class BadAudio(Exception):
    """A file cannot be decoded; the message is for its sender."""


class Samples:
    """Collects blocks of audio.

    Args:
        source_rate: samples a second of what comes in.
        sample_rate: of what comes out.
        max_seconds: more is refused.

    Raises:
        BadAudio: the source's rate is not believed.
    """

    def __init__(self, source_rate: int, sample_rate: int, max_seconds: float) -> None:
        low, high = SOURCE_RATES
        if not low <= source_rate <= high:
            raise BadAudio(f"{source_rate} samples a second; must be {low} to {high}")
        self._rate = source_rate
        self._max_seconds = max_seconds
        self._resampler = None
        if source_rate != sample_rate:
            self._resampler = soxr.ResampleStream(source_rate, sample_rate, 1, dtype="float32")
        self._frames = 0
        self._data = bytearray()

    @property
    def seconds(self) -> float:
        """Seconds that have arrived so far."""
        return self._frames / self._rate

    def check_seconds(self, seconds: float) -> None:
        """Raises: BadAudio, so much would be too long."""
        if seconds > self._max_seconds:
            raise BadAudio(
                f"{seconds:.1f} seconds of audio; at most {self._max_seconds:g} are taken"
            )

    def add(self, block: npt.NDArray[np.float32]) -> None:
        """Take in a block.

        Args:
            block: [frames, channels].

        Raises:
            BadAudio: too long, too many channels, or numbers that are none.
        """
        frames, channels = block.shape
        if not 1 <= channels <= MAX_CHANNELS:
            raise BadAudio(f"{channels} channels; at most {MAX_CHANNELS} are taken")
        self._frames += frames
        self.check_seconds(self.seconds)
        mono = block[:, 0] if channels == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise BadAudio("damaged: it holds numbers that are not finite")
        self._put(mono, last=False)

    def finish(self) -> bytearray:
        """All samples: float32 in the machine's byte order, -1..1. Once.

        Raises:
            BadAudio: there is not one.
        """
        if self._resampler is not None:
            self._put(np.zeros(0, np.float32), last=True)
        if not self._data:
            raise BadAudio("no sound in it")
        return self._data

    def _put(self, mono: npt.NDArray[Any], *, last: bool) -> None:
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(np.ascontiguousarray(mono, np.float32), last=last)
        self._data += np.clip(mono, -1.0, 1.0).astype(np.float32).tobytes()
