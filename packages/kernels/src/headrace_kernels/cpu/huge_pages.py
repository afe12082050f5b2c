"""Memory for packed weights: large pages where the system gives them. Imports no torch.

A decode step reads every weight once. With 4 KiB pages the walk of the page tables costs a large
part of the memory's bandwidth; pages of 2 MiB all but remove it.
Linux gives them on request (``madvise``), other systems decide for themselves.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

HUGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64, and on arm64 with 4 KiB base pages."""


class Region(NamedTuple):
    """Private memory of the system's, not written yet, that goes back with ``mapping``."""

    mapping: mmap.mmap
    start: int
    """Bytes into the mapping to a large page's border."""
    address: int
    """Of that border."""


def huge_region(num_bytes: int) -> Region:
    """Memory for ``num_bytes`` at a large page's border.

    Raises:
        OSError: the system gives none.
    """
    if hasattr(mmap, "MAP_PRIVATE"):
        # Private: shared anonymous memory is a file system's, whose pages are small by default.
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    address = address_of(mapping)
    start = -address % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # An end of less than half a page is small pages: a large one would be mostly empty.
        pages = (num_bytes + HUGE_PAGE // 2) // HUGE_PAGE
        mapping.madvise(mmap.MADV_HUGEPAGE, start, pages * HUGE_PAGE)
    return Region(mapping, start, address + start)


def address_of(mapping: mmap.mmap) -> int:
    """Where a writable mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
