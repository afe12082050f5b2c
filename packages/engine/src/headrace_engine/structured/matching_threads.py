"""Threads in which slow constraints are matched beside the steps."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_THREADS = 2
"""Threads of one worker, however many requests are slow: the other cores compute steps."""
NICENESS = 10
"""Niceness of the threads: steps go first."""


class MatchingThreads:
    """A bounded pool of threads, which begin with the first call.

    Each call is one token's matching of one request, so requests take turns.

    Args:
        count: of threads; 0: one for every two cores, at most :data:`MAX_THREADS`.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count or max(1, min(MAX_THREADS, len(_cores()) // 2))
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run a call, which must not raise, in one of the threads. Called from one thread only.

        Raises:
            RuntimeError: the threads are closed.
        """
        if self._closed:
            raise RuntimeError("the threads that match constraints are closed")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, "headrace-matching", _step_aside)
        return self._pool.submit(call)

    def close(self) -> None:
        """Drop the calls that have not begun and wait for those that run. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> set[int]:
    """Cores of the process: the worker's thread, which starts the others, may have one of its own."""
    if not sys.platform.startswith("linux"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(os.getpid())


def _step_aside() -> None:
    """Let the calling thread onto the process's cores, with less right to them than the steps."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _cores())
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
