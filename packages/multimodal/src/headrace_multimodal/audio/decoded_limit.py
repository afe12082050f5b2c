"""Limit on decoded audio in use: a small file may hold hours of silence, and many may come at once."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from headrace_core.errors import QueueFull
from headrace_core.speech.model import AudioClip


class HeldAudio:
    """Counts clips for as long as somebody has their samples, or views of them.

    Args:
        max_seconds: of all clips together; a single one may be as long.
    """

    def __init__(self, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._clips: list[tuple[weakref.ref[Any], float]] = []

    @property
    def seconds(self) -> float:
        """In use now."""
        return sum(seconds for samples, seconds in self._clips if samples() is not None)

    def add(self, clip: AudioClip) -> None:
        """Count a clip from now on.

        Raises:
            QueueFull: it would be too much.
        """
        with self._lock:
            self._clips = [held for held in self._clips if held[0]() is not None]
            if self.seconds + clip.seconds > self._max_seconds:
                raise QueueFull(
                    f"{self.seconds:.0f} seconds of audio are in work; with {clip.seconds:.0f} more "
                    f"they would be over {self._max_seconds:g}",
                    retry_after=10.0,
                )
            self._clips.append((weakref.ref(clip.samples), clip.seconds))
