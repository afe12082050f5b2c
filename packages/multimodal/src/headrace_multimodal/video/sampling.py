"""Frames that are taken of a video: so many, or so many a second, evenly spaced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_FRAMES = 32
ALL = -1


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """How many frames of a video are taken.

    Args:
        num_frames: the number; :data:`ALL`: every frame. Shorter videos give what they have.
        fps: frames of a second, in place of the number.
    """

    num_frames: int = NUM_FRAMES
    fps: float | None = None

    def count(self, total: int, rate: float) -> int:
        """Frames that are taken, at least 1, of ``total`` that play at ``rate`` a second."""
        if self.fps is not None:
            return min(total, max(1, int(total / rate * self.fps)))
        return total if self.num_frames == ALL else min(total, self.num_frames)

    def indices(self, total: int, rate: float) -> list[int]:
        """Which ones: evenly spaced, the first and the last among them."""
        count = self.count(total, rate)
        found: list[int] = np.linspace(0, total - 1, count, dtype=np.int64).tolist()
        return found

    def most(self, limit: int) -> int:
        """Most frames that any video gives, where ``limit`` are accepted."""
        return (
            limit if self.fps is not None or self.num_frames == ALL else min(limit, self.num_frames)
        )
