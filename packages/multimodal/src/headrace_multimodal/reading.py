"""A thread that reads media knows whether anybody still waits: :func:`reading`, :func:`current`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import NamedTuple


class Reading(NamedTuple):
    """One item that is being read."""

    abandoned: Future[None]
    """Done when nobody waits for the item any more."""
    admit: Callable[[], object] = lambda: None
    """Called when the item is decoded; blocks while too many are held so."""

    def check(self) -> None:
        """Raises: CancelledError: nobody waits for the item any more."""
        if self.abandoned.done():
            raise CancelledError


_thread = threading.local()


@contextmanager
def reading(abandoned: Future[None], admit: Callable[[], object]) -> Iterator[None]:
    """What this thread fetches and decodes meanwhile ends with CancelledError once ``abandoned`` is done."""
    before = current()
    _thread.reading = Reading(abandoned, admit)
    try:
        yield
    finally:
        _thread.reading = before


def current() -> Reading:
    """What this thread reads; one that is never abandoned where nobody has said."""
    found: Reading | None = getattr(_thread, "reading", None)
    return Reading(Future()) if found is None else found
