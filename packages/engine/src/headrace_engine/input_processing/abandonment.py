"""Requests that nobody waits for any more, told to the threads that read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

_thread = threading.local()


@contextmanager
def read_until(abandoned: Future[None]) -> Iterator[None]:
    """Tell what this thread reads meanwhile that nobody waits for it once ``abandoned`` is done."""
    _thread.abandoned = abandoned
    try:
        yield
    finally:
        _thread.abandoned = None


def abandonment() -> Future[None]:
    """Done once nobody waits for what this thread reads."""
    found: Future[None] | None = getattr(_thread, "abandoned", None)
    return Future() if found is None else found


def check_wanted() -> None:
    """Raises: CancelledError: nobody waits for what this thread reads."""
    if abandonment().done():
        raise CancelledError
