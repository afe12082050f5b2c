"""Checks of what callers give a communicator of GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

ADDED = ("float32", "bfloat16", "float16", "float64", "int32", "int64")
"""dtypes that can be added up."""


def can_be_added(tensor: Tensor, operation: str) -> None:
    """Check that a tensor's dtype can be added up.

    Raises:
        ValueError: it cannot.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ADDED:
        raise ValueError(
            f"{operation}: tensors of {name} cannot be added up; must be one of {', '.join(ADDED)}"
        )


def on_device(tensor: Tensor, device: torch.device, operation: str) -> Tensor:
    """The tensor itself.

    Raises:
        ValueError: it lies elsewhere.
    """
    if tensor.device != device:
        raise ValueError(f"{operation}: the tensor is on {tensor.device}, must be on {device}")
    return tensor


def pieces_of(tensor: Tensor, dim: int, world_size: int) -> Tensor:
    """[world_size, ...], contiguous: each rank's part along ``dim``."""
    return torch.stack(tensor.chunk(world_size, dim))
