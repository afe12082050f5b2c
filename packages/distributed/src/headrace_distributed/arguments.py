"""Checks of what callers give a communicator."""

from __future__ import annotations

from torch import Tensor

from headrace_core.errors import ConfigError


def check_ranks(rank: int, world_size: int) -> None:
    """Check that ``rank`` is one of ``world_size`` ranks.

    Raises:
        ConfigError: it is not.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank = {rank} must be within 0 and world_size - 1 = {world_size - 1}")


def check_source(source: int, world_size: int) -> None:
    """Check that ``source`` is one of ``world_size`` ranks.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= source < world_size:
        raise ValueError(f"source = {source} must be a rank within 0 and {world_size - 1}")


def on_cpu(tensor: Tensor, operation: str) -> Tensor:
    """The tensor itself.

    Raises:
        ValueError: it lies elsewhere.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"{operation}: the tensor is on {tensor.device}, must be on the CPU")
    return tensor


def normal_dim(tensor: Tensor, dim: int, operation: str, parts: int = 1) -> int:
    """``dim`` counted from 0.

    Raises:
        ValueError: the tensor has no such dimension, or ``parts`` do not divide it.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{operation}: dim = {dim} is not a dimension of a tensor of shape {list(tensor.shape)}"
        )
    if tensor.shape[dim] % parts:
        raise ValueError(
            f"{operation}: {parts} ranks do not divide dimension {dim} of a tensor of shape "
            f"{list(tensor.shape)}"
        )
    return dim % tensor.dim()
