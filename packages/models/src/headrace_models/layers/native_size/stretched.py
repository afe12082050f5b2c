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
_CUBIC, _LINEAR = (-1, 0, 1, 2), (0, 1)
"""Steps from the number before a place to those that count."""


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


def stretched(table: Tensor, height: int, width: int, *, cubic: bool = True) -> Tensor:
    """A table of vectors [rows, columns, size] as one of [height, width, size] float32, read between its rows
    and columns; beyond its edges stand the vectors of the edge.

    Args:
        cubic: by cubic convolution; False: in straight lines.
    """
    rows, columns, size = table.shape
    tall = line_weights(height, rows, cubic=cubic).to(table.device) @ table.float().flatten(1)
    across = line_weights(width, columns, cubic=cubic).to(table.device)
    return across @ tall.view(height, columns, size)


def line_weights(size: int, side: int, *, cubic: bool = True) -> Tensor:
    """[size, side] float32: shares of a line's ``side`` numbers in each of ``size`` that cover the same
    length; a number stands in the middle of its part of the line."""
    at = (torch.arange(size, dtype=torch.float32) + 0.5) * side / size - 0.5
    low = at.floor()
    weights = torch.zeros(size, side)
    for step in _CUBIC if cubic else _LINEAR:
        distance = (at - low - step).abs()
        share = _cubic_share(distance) if cubic else 1 - distance
        tap = (low + step).clamp(0, side - 1).long()
        weights.scatter_add_(1, tap[:, None], share[:, None])
    return weights


def _cubic_share(distance: Tensor) -> Tensor:
    """Share of a number that is so far away, at most 2."""
    a, x = _SLOPE, distance
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, far)
