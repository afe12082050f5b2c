"""Keeping the worker's thread on its core.

The thread that runs steps is one of those that compute: native kernels count it as the first of
their pool. Threads inherit the cores of the thread that starts them, so the worker is first let
onto all of the pool's cores, and onto its own alone once everything that starts threads has run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

_SPREAD = 1 << 16
"""Elements that torch gives to one thread at least, and then some."""


class ThreadBinding:
    """Binds the calling thread, and threads that it starts, to cores. Linux only.

    Args:
        cores: of the threads that compute, the calling thread's first; empty: nothing is bound.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._before: set[int] | None = None

    def enter(self) -> None:
        """Let this thread, and those that it starts from now on, onto the cores and no others."""
        if self._cores:
            self._before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores)
            # Torch starts its threads when it first has work for several.
            torch.zeros(_SPREAD * torch.get_num_threads()).add_(1)

    def narrow(self) -> None:
        """Let this thread onto the first core alone."""
        if self._cores:
            os.sched_setaffinity(0, self._cores[:1])

    def widen(self) -> None:
        """Undo :meth:`narrow`, for threads that are started from now on."""
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    def leave(self) -> None:
        """Let this thread onto the cores that it had before. Idempotent."""
        if self._before is not None:
            os.sched_setaffinity(0, self._before)
            self._before = None
