"""Threads of an engine."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

_BESIDE_NICENESS = 10
"""Niceness of threads that work beside steps; 0 is that of steps, 19 the most."""


def in_this_context(run: Callable[[], None]) -> Callable[[], None]:
    """``run`` for another thread, in a copy of the context of the one that calls this."""
    return functools.partial(copy_context().run, run)


def lower_priority() -> None:
    """Let others go before this thread, and those that it starts. On Linux a thread has a priority."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BESIDE_NICENESS)
