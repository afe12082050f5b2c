"""A tower of the library timm, which a config calls by its name there: SigLIP's for images of any number of
patches, whose learned places are stretched over the image.

Zhai et al. 2023, arXiv:2303.15343.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6


class VitSizes(NamedTuple):
    """Numbers that a name stands for."""

    hidden: int
    inner: int
    layers: int
    heads: int
    patch: int
    side: int
    """Patches along a side of the images of its training."""


SIZES: Mapping[str, VitSizes] = {
    "vit_so400m_patch14_siglip_384.webli": VitSizes(1152, 4304, 27, 16, 14, 27),
}
"""Name of a tower -> its numbers."""


def named_vit_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`NamedVit`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.pos_embed", f"{target}.places.vector"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{source}.norm", f"{target}.last_norm"),
    )


class NamedVit(Layer):
    """Images of different sizes, one behind the other, which do not see each other -> states of patches.

    Args:
        kind: name of the tower, one of :data:`SIZES`.
        name: as the checkpoint spells it.
        drops_last: the last block is left out.

    Raises:
        UnsupportedModel: the name is unknown.
    """

    def __init__(self, context: BuildContext, kind: object, name: str, *, drops_last: bool) -> None:
        if not isinstance(kind, str) or kind not in SIZES:
            raise UnsupportedModel(
                f"config.json: vision_encoder = {kind!r:.200}: must be {' or '.join(SIZES)}"
            )
        sizes = SIZES[kind]
        self.size, self.side = sizes.hidden, sizes.side
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel = (3, sizes.patch, sizes.patch)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, self.size, bias=True
        )
        self.places = Vector(f"{name}.pos_embed", 1, self.side**2, self.size)
        self.layers = [
            _block(context, sizes, f"{name}.blocks.{index}")
            for index in range(sizes.layers - drops_last)
        ]
        self.last_norm = LayerNorm(context, f"{name}.norm", self.size, _EPS)

    def packed(self, patches: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """
        Args:
            patches: [T, C * patch * patch], image by image and row by row.
            grids: rows and columns of each image's patches.

        Returns:
            [T, H].
        """
        x = self.patches(patches.to(self.dtype))
        x = x + torch.cat([stretched(self.places.vector[0], *grid) for grid in grids])
        segments = Segments.of([math.prod(grid) for grid in grids], x.device)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        x, _ = self.last_norm.add(x, residual)
        return x


def stretched(table: Tensor, rows: int, columns: int) -> Tensor:
    """table [places of a square, H] -> [rows * columns, H]; where a side shrinks, places are averaged."""
    side = math.isqrt(len(table))
    if (rows, columns) == (side, side):
        return table
    square = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    found = functional.interpolate(square, (rows, columns), mode="bicubic", antialias=True)
    return found.flatten(2)[0].T.to(table.dtype)


def _block(context: BuildContext, sizes: VitSizes, name: str) -> VisionBlock:
    attention = VisionAttention(
        context,
        f"{name}.attn",
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        names=(("qkv",), "proj"),
    )
    mlp = MLP(context, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes.hidden, sizes.inner, "gelu")
    norms = [LayerNorm(context, f"{name}.norm{which}", sizes.hidden, _EPS) for which in (1, 2)]
    return VisionBlock(norms[0], attention, norms[1], mlp)
