"""SigLIP's tower on tiles of which margins may be no part of the image: they see it, and it does not see
them.

Abouelenin et al. 2025, arXiv:2503.01743, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_models.layers.vision.patches import in_patches
from headrace_models.layers.vision.towers.fractional import FractionalTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.layers.vision.blocks import VisionBlock

_STEP = 2
"""Rows and columns of patches that become one together."""


class TileTower(FractionalTower):
    """Two by two patches become a state, their mean."""

    def pooled(self, tiles: Tensor, kept: Sequence[tuple[int, int]]) -> list[Tensor]:
        """
        Args:
            tiles: [N, 3, side, side].
            kept: rows and columns of each tile's patches, from the upper left, that are of the image.

        Returns:
            [ceil(rows / 2), ceil(columns / 2), H] of each; the odd ones are means with margins.
        """
        flat = in_patches(tiles.to(self.dtype), self.patch)
        patches = flat.view(len(flat), self.side, self.side, -1)
        grids = [(rows + rows % _STEP, columns + columns % _STEP) for rows, columns in kept]
        cut = [own[:h, :w].flatten(0, 1) for own, (h, w) in zip(patches, grids, strict=True)]
        whole = [i for i, grid in enumerate(grids) if grid == kept[i] and min(grid)]
        found = [own.new_zeros(0, self.positions.size) for own in cut]
        if whole:
            states = self.packed(torch.cat([cut[i] for i in whole]), [grids[i] for i in whole])
            sizes = [len(cut[i]) for i in whole]
            for i, own in zip(whole, torch.split(states, sizes), strict=True):
                found[i] = own
        for i, grid in enumerate(grids):
            if grid != kept[i] and min(kept[i]):
                found[i] = self._with_margins(cut[i], grid, kept[i])
        return [_halved(own, *grid) for own, grid in zip(found, grids, strict=True)]

    def _with_margins(
        self, patches: Tensor, grid: tuple[int, int], kept: tuple[int, int]
    ) -> Tensor:
        """patches [T, C * patch * patch] of a grid -> [T, H]."""
        rows, columns = kept
        places = self.positions.weight[0].expand(*grid, -1).clone()
        places[:rows, :columns] = self.placed_in(rows, columns).view(rows, columns, -1)
        is_seen = torch.zeros(grid, dtype=torch.bool, device=patches.device)
        is_seen[:rows, :columns] = True
        x, residual = self.patches(patches) + places.flatten(0, 1), None
        for layer in self.layers:
            x, residual = _masked(layer, x, residual, is_seen.flatten())
        return x if residual is None else self.ops.add(x, residual)


def _masked(
    block: VisionBlock, x: Tensor, residual: Tensor | None, is_seen: Tensor
) -> tuple[Tensor, Tensor]:
    """A block in which all see those of ``is_seen`` [T] only. The ops' attention has no such masks."""
    x, stream = block.attention_norm.add(x, residual)
    query, key, value = (part.transpose(0, 1)[None] for part in block.attention.project(x))
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=is_seen[None, None, None]
    )
    x = block.attention.out(found[0].transpose(0, 1).flatten(1))
    x, stream = block.mlp_norm.add(x, stream)
    return block.mlp(x), stream


def _halved(states: Tensor, rows: int, columns: int) -> Tensor:
    """[rows * columns, H] -> [rows / 2, columns / 2, H]."""
    return states.reshape(rows // _STEP, _STEP, columns // _STEP, _STEP, states.shape[1]).mean(
        dim=(1, 3)
    )
