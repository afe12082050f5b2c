"""Memory that is freed while a checkpoint is read goes back to the system at once.

glibc takes large blocks from the system one by one and returns them when they are freed, but raises the size
from which it does so each time such a block is freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Reading
tensors of all sizes, it then keeps a third and more of what was needed for a moment.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_LARGE = 1 << 20
"""Bytes from which a block is returned."""
_USUAL = 32 << 20
"""What the size comes to by itself in a process that frees large blocks."""
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@contextmanager
def freed_memory_returns() -> Iterator[None]:
    """While it is open, of the whole process. Nothing happens with another library than glibc, or where the
    environment says what is to be kept."""
    mallopt = None if any(name in os.environ for name in _SETTINGS) else _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _USUAL)
        mallopt(_TRIM_THRESHOLD, 2 * _USUAL)


def _mallopt() -> Callable[[int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        found: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None
    return found
