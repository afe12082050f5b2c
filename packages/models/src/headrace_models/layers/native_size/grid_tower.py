"""What towers of patches in time, height and width have in common: blocks in which each frame sees itself,
and rotation by row and column.

Wang et al. 2024, arXiv:2409.12191.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.base import Layer
from headrace_models.layers.vision.axes import frequencies, places, rotary_rows
from headrace_models.layers.vision.blocks import Segments, VisionBlock
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GridTower(Layer):
    """A family makes :attr:`layers`, and says what stands in front of them and behind.

    Patches come square by square: those that become one vector are adjacent.

    Args:
        head_dim: numbers of a head.
        merge: patches of a side of the square that becomes a vector.
        theta: base of the rotation.
        joins_frames: all patches of a video see each other, not those of a frame alone.
    """

    layers: list[VisionBlock]

    def __init__(
        self,
        context: BuildContext,
        *,
        head_dim: int,
        merge: int,
        theta: float = 10_000.0,
        joins_frames: bool = False,
    ) -> None:
        if not head_dim or head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {head_dim} numbers do not turn by two axes"
            )
        self.ops, self.device = context.ops, context.device
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.head_dim, self.merge, self.theta = head_dim, merge, theta
        self.joins_frames = joins_frames

    def run(self, x: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, Tensor | None]:
        """All blocks: what the last one adds to the stream, and the stream.

        Args:
            x: [patches of all items, size].
        """
        rotary = torch.cat([self.rotary(grid) for grid in grids]).to(x.device)
        sizes = [h * w for t, h, w in grids for _ in range(t)]
        if self.joins_frames:
            sizes = [t * h * w for t, h, w in grids]
        segments = Segments.of(sizes, x.device)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        return x, residual

    def rotary(self, grid: Grid) -> Tensor:
        """[T, D]: cosines and sines of patches, a quarter of the numbers by row and a quarter by column."""
        time, height, width = grid
        turning = frequencies(self.theta, self.head_dim // 4)
        return rotary_rows(places(height, width, self.merge), turning, turning).repeat(time, 1)

    def split(self, vectors: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Vectors of all items, item by item."""
        return list(torch.split(vectors, [t * h * w // self.merge**2 for t, h, w in grids]))
