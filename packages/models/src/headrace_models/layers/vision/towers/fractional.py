"""SigLIP's tower for images of any number of patches.

Dehghani et al. 2023, arXiv:2307.06304.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.vision.blocks import Segments
from headrace_models.layers.vision.towers.clip import ClipTower

if TYPE_CHECKING:
    from torch import Tensor


class FractionalTower(ClipTower):
    """A patch has the place of the table that lies at the same fraction of the image's side."""

    def placed(self, side: int) -> Tensor:
        return self.placed_in(side, side)

    def placed_in(self, height: int, width: int) -> Tensor:
        """[height * width, H]: what tells the places of so many rows and columns of patches."""
        rows, columns = fractions(height, self.side), fractions(width, self.side)
        places = rows[:, None] * self.side + columns[None, :]
        weight = self.positions.weight
        return weight[places.flatten().to(weight.device)]

    def packed(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Images of different sizes, one behind the other, which do not see each other.

        Args:
            patches: [T, C * patch * patch], image by image and row by row.
            grids: rows and columns of each image's patches.

        Returns:
            [T, H].
        """
        x = self.patches(patches.to(self.dtype))
        x = x + torch.cat([self.placed_in(*grid) for grid in grids])
        segments = Segments.of([rows * columns for rows, columns in grids], x.device)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        if self.last_norm is not None:
            x, _ = self.last_norm.add(x, residual)
        elif residual is not None:
            x = self.ops.add(x, residual)
        return x


def fractions(number: int, size: int) -> Tensor:
    """[number] int64: for ``number`` steps along a side, the one of ``size`` equal intervals that each lies
    in. In single precision as models are trained, where a step may fall just below its own interval."""
    bounds = torch.arange(1 / size, 1.0, 1 / size, dtype=torch.float32)
    steps = torch.arange(number, dtype=torch.float32) * (1.0 / torch.tensor(number))
    return torch.bucketize(steps.clamp(max=1.0 - 1e-6), bounds, right=True)
