"""Threads of an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import copy_context


def in_this_context(run: Callable[[], None]) -> Callable[[], None]:
    """``run`` for another thread, in a copy of the context of the one that calls this."""
    return functools.partial(copy_context().run, run)
