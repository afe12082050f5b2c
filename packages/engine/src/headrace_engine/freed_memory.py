"""Memory that has been freed, given back to the system.

glibc keeps it in the arena of the thread that allocated it. Tokenizing a text takes a hundred times its
memory, in small pieces: a thread that has seen one long text would hold hundreds of megabytes for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

LARGE = 1 << 18
"""Characters of texts after which memory is given back; for less it is not worth the milliseconds."""


def trim() -> None:
    """Give memory that is free within the C library back to the system, where it can."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


@contextlib.contextmanager
def trimmed_after(*texts: str) -> Iterator[None]:
    """:func:`trim` after the block, if these texts are long."""
    try:
        yield
    finally:
        if sum(map(len, texts)) > LARGE:
            trim()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function that returns free memory to the system (malloc_trim(3)); None elsewhere."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
