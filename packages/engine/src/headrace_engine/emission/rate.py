"""How fast waiting requests get their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

KEPT_STARTS = 256
"""Starts over which the rate is measured."""
PAUSE = 30.0
"""Seconds without a start after which what was before says nothing about now."""
UNKNOWN = 1.0
"""Seconds to wait where nothing was measured."""


class StartRate:
    """Completions that produced their first token, and the prompt tokens behind them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starts: deque[tuple[float, int, int]] = deque(maxlen=KEPT_STARTS)
        """Time, completions, prompt tokens."""

    def record(self, num_starts: int, num_tokens: int) -> None:
        """So many completions produced something for the first time."""
        now = self._clock()
        if self._starts and now - self._starts[-1][0] > PAUSE:
            self._starts.clear()
        self._starts.append((now, num_starts, num_tokens))

    def seconds_until(self, num_starts: int = 0, num_tokens: int = 0) -> float:
        """How long so many starts, or starts with so many prompt tokens, take: the longer one.

        Counted up to now, so that a queue that has stopped moving looks slow.
        """
        if len(self._starts) < 2:
            return UNKNOWN
        # What came with the first one began before it.
        seconds = max(self._clock() - self._starts[0][0], 1e-3)
        _, *later = self._starts
        starts = sum(number for _, number, _ in later)
        tokens = sum(number for _, _, number in later)
        return max(num_starts * seconds / max(1, starts), num_tokens * seconds / max(1, tokens))
