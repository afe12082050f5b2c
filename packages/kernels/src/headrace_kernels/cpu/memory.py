"""Tensors for packed weights, in large pages (:mod:`headrace_kernels.cpu.huge_pages`)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.cpu.huge_pages import HUGE_PAGE, Region, huge_region


def packed_buffer(num_bytes: int) -> Tensor:
    """An uninitialised uint8 tensor [num_bytes] that starts at a large page's border.

    Small buffers share no large page with others, so those under a page are ordinary memory. The
    memory goes back to the system with the tensor.
    """
    if num_bytes < HUGE_PAGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return as_tensor(huge_region(num_bytes), num_bytes)


def as_tensor(region: Region, num_bytes: int) -> Tensor:
    """A region's first bytes as a uint8 tensor [num_bytes], with which the region goes."""
    whole = torch.frombuffer(region.mapping, dtype=torch.uint8)
    return whole[region.start : region.start + num_bytes]
