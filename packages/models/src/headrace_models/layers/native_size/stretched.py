"""Learned positions of a square of patches, stretched to an image of any size.

Keys 1981, "Cubic convolution interpolation for digital image processing", with a = -0.75 as torch has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

_SLOPE = -0.75
_TAPS = (-1, 0, 1, 2)


class PositionTable(WeightLayer):
    """Vectors of a square's places, stored as [rows, columns, size].

    Args:
        name: as the checkpoint spells it.
        shape: rows, columns, and numbers of a vector.
    """

    weight: Tensor

    def __init__(self, name: str, shape: tuple[int, int, int]) -> None:
        self.name, self.shape = name, shape

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


def stretched(table: Tensor, height: int, width: int) -> Tensor:
    """A table of vectors [rows, columns, size] as one of [height, width, size] float32: read between its rows
    and columns by cubic convolution; beyond its edges stand the vectors of the edge."""
    rows, columns, size = table.shape
    tall = cubic_weights(height, rows).to(table.device) @ table.float().flatten(1)
    wide = cubic_weights(width, columns).to(table.device) @ tall.view(height, columns, size)
    return wide


def cubic_weights(size: int, side: int) -> Tensor:
    """[size, side] float32: shares of a line's ``side`` numbers in each of ``size`` that cover the same
    length; a number stands in the middle of its part of the line."""
    at = (torch.arange(size, dtype=torch.float32) + 0.5) * side / size - 0.5
    low = at.floor()
    weights = torch.zeros(size, side)
    for step in _TAPS:
        tap = (low + step).clamp(0, side - 1).long()
        weights.scatter_add_(1, tap[:, None], _kernel((at - low - step).abs())[:, None])
    return weights


def _kernel(distance: Tensor) -> Tensor:
    """Share of a number that is so far away, at most 2."""
    a, x = _SLOPE, distance
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, far)
