"""Bounds the processor time that matching one request's constraint may take.

A backend's own limits bound a single step. This bounds their sum: a constraint that stays just
below those limits would slow every step that its request takes part in, and so all other requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MATCHING_SECONDS = 0.25
"""Default of what a request may take beyond :data:`SECONDS_PER_TOKEN`."""
SECONDS_PER_TOKEN = 1e-3
"""Free for each token: several times what usual constraints take with large vocabularies."""


class MatchingBudget:
    """Processor time that one request's matching has taken, and may take.

    Args:
        seconds: that may be taken in all, beyond those that are free.
        clock: processor time of the calling thread, in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        self._left = seconds
        self._clock = clock
        self.last = 0.0
        """Seconds that :meth:`one_token` measured last."""

    @property
    def exceeded(self) -> bool:
        """True once the request must end."""
        return self._left < 0

    @contextmanager
    def one_token(self) -> Iterator[None]:
        """Charge what is done inside, beyond the seconds that are free for each token."""
        start = self._clock()
        try:
            yield
        finally:
            self.last = self._clock() - start
            self._left -= max(0.0, self.last - SECONDS_PER_TOKEN)
