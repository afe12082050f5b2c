"""Bounds the processor time that matching one request's constraint may take.

A backend's own limits bound a single step. This bounds their sum: a constraint that stays just
below those limits would slow every step that its request takes part in, and so all other requests.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MATCHING_SECONDS = 0.25
"""Default of what a request may take beyond :data:`SECONDS_PER_TOKEN`."""
SECONDS_PER_TOKEN = 1e-3
"""Free for each token: several times what usual constraints take with large vocabularies."""


class MatchingClock:
    """Processor time of the calling thread, in seconds, without the garbage collector's.

    A collection takes as long as the process is large, up to seconds, in whichever thread it comes due:
    no request is charged for what others left behind. Counts from its making until :meth:`close`.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._called = self._collects  # one object, which can be found again
        gc.callbacks.append(self._called)

    def __call__(self) -> float:
        collected: float = getattr(self._thread, "collected", 0.0)
        return time.thread_time() - collected

    def close(self) -> None:
        """Count collections no more. Idempotent."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._thread.begin = time.thread_time()
        else:
            took = time.thread_time() - getattr(self._thread, "begin", time.thread_time())
            self._thread.collected = getattr(self._thread, "collected", 0.0) + max(0.0, took)


class MatchingBudget:
    """Processor time that one request's matching has taken, and may take.

    Args:
        seconds: that may be taken in all, beyond those that are free.
        clock: processor time of the calling thread, in seconds; usually a :class:`MatchingClock`.
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
