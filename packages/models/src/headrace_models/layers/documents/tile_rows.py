"""States of an image's tiles as rows of the whole image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def ended_rows(tiles: Tensor, grid: tuple[int, int], end: Tensor) -> Tensor:
    """Rows of states of all tiles, each with its end: [rows * (columns + 1), H].

    Args:
        tiles: [tiles, rows, columns, H].
        grid: columns and rows of tiles.
        end: [H].
    """
    columns, rows = grid
    size = tiles.shape[-1]
    plane = tiles.view(rows, columns, *tiles.shape[1:]).transpose(1, 2)
    lines = plane.reshape(rows * tiles.shape[1], -1, size)
    ends = end.expand(len(lines), 1, size)
    return torch.cat((lines, ends), dim=1).flatten(0, 1)
