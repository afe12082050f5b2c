"""Memory for packed weights: large pages where the system gives them.

A decode step reads every weight once. With 4 KiB pages the walk of the page tables costs a large
part of the memory's bandwidth; pages of 2 MiB all but remove it.
Linux gives them on request (``madvise``), other systems decide for themselves.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes of a large page on x86-64, and on arm64 with 4 KiB base pages."""


def packed_buffer(num_bytes: int) -> Tensor:
    """An uninitialised uint8 tensor [num_bytes] that starts at a large page's border.

    Small buffers share no large page with others, so those under a page are ordinary memory. The
    memory goes back to the system with the tensor.
    """
    if num_bytes < HUGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if hasattr(mmap, "MAP_PRIVATE"):
        # Private: shared anonymous memory is a file system's, whose pages are small by default.
        region = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        region = mmap.mmap(-1, num_bytes + HUGE_PAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # An end of less than half a page is small pages: a large one would be mostly empty.
        pages = (num_bytes + HUGE_PAGE // 2) // HUGE_PAGE
        region.madvise(mmap.MADV_HUGEPAGE, skip, pages * HUGE_PAGE)
    return whole[skip : skip + num_bytes]
