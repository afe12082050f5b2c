"""Places of patches in an image, and rotation by them. Letters: T patches, D head size."""

from __future__ import annotations

import torch
from torch import Tensor


def places(height: int, width: int, merge: int = 1) -> Tensor:
    """[height * width, 2] int64: row and column of each patch.

    Args:
        merge: squares of ``merge * merge`` patches come one after the other, and so do their patches;
            1: row by row.
    """
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack((rows, columns), dim=-1)
    squares = both.view(height // merge, merge, width // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def frequencies(theta: float, count: int, first: int = 0, step: int = 1) -> Tensor:
    """[ceil((count - first) / step)] float32: ``theta ** (-i / count)`` for i = first, first + step ..."""
    return 1.0 / theta ** (torch.arange(first, count, step, dtype=torch.float32) / count)


def rotary_rows(places: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """[T, D]: half cosines, half sines; in each half first the angles by row, then those by column.

    Args:
        places: [T, 2].
        by_row, by_column: [D/4] each, frequencies.
    """
    rows, columns = places.float().unbind(-1)
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
