"""The tower of SAM, with two convolutions more: most blocks see windows of an image, some all of it, by
relative places; sixteen patches become one state.

Kirillov et al. 2023, arXiv:2304.02643; Wei et al. 2025, arXiv:2510.18234. Letters: I images, N images or
windows, R rows, C columns, H hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_DEFAULTS: Mapping[str, Any] = {
    "width": 768, "layers": 12, "heads": 12, "patch_size": 16, "window_size": 14, "neck_channels": 256,
    "global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512, 1024],
}  # fmt: skip
"""Values that configs may leave out."""
_MOST_BIASES = 1 << 24
"""Numbers of a table of relative places that is made at once."""
SHRINKS = 4
"""Patches of a side of the square that becomes a state."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`SamTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.blocks.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.pos_embed", f"{target}.positions.vector"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv"),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.attn.rel_pos_h", f"{own}.attention.rows.vector"),
        WeightRule(f"{block}.attn.rel_pos_w", f"{own}.attention.columns.vector"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.lin1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.lin2", f"{own}.mlp.down"),
        WeightRule(f"{source}.neck.0.weight", f"{target}.narrow.vector"),
        WeightRule(f"{source}.neck.1", f"{target}.narrow_norm"),
        WeightRule(f"{source}.neck.2.weight", f"{target}.mix.vector"),
        WeightRule(f"{source}.neck.3", f"{target}.mix_norm"),
        WeightRule(f"{source}.net_2.weight", f"{target}.half.vector"),
        WeightRule(f"{source}.net_3.weight", f"{target}.quarter.vector"),
    )


class SamTower(Layer):
    """Square images of any size -> a map of states, a quarter as wide as patches are many.

    Args:
        stated: the tower's part of the config.
        image_size: pixels of the images that the table of places is for.
        name: as the checkpoint spells it.
    """

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], image_size: int, name: str
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        hidden, self.patch = settings.integer("width"), settings.integer("patch_size")
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        side, number = image_size // self.patch, settings.integer("layers", maximum=MAX_LAYERS)
        kernel, window = (3, self.patch, self.patch), settings.integer("window_size")
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, hidden, bias=True
        )
        self.positions = Vector(f"{name}.pos_embed", 1, side, side, hidden)
        whole, heads = settings.integers("global_attn_indexes"), settings.integer("heads")
        self.blocks = [
            SamBlock(
                context,
                f"{name}.blocks.{index}",
                (hidden, heads),
                side=side,
                window=0 if index in whole else window,
            )
            for index in range(number)
        ]
        neck = settings.integer("neck_channels")
        half, self.size = settings.integers("downsample_channels", 2)
        self.narrow = Vector(f"{name}.neck.0.weight", neck, hidden, 1, 1)
        self.narrow_norm = LayerNorm(context, f"{name}.neck.1", neck, _EPS)
        self.mix = Vector(f"{name}.neck.2.weight", neck, neck, 3, 3)
        self.mix_norm = LayerNorm(context, f"{name}.neck.3", neck, _EPS)
        self.half = Vector(f"{name}.net_2.weight", half, neck, 3, 3)
        self.quarter = Vector(f"{name}.net_3.weight", self.size, half, 3, 3)

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, R, C, size]."""
        count, side = len(images), images.shape[-1] // self.patch
        flat = in_patches(images.to(self.dtype), self.patch).flatten(0, 1)
        x = self.patches(flat).view(count, side, side, -1) + self._placed(side)
        for block in self.blocks:
            x = block(x)
        x = _normed(functional.conv2d(x.permute(0, 3, 1, 2), self.narrow.vector), self.narrow_norm)
        x = _normed(functional.conv2d(x, self.mix.vector, padding=1), self.mix_norm)
        for kernel in (self.half, self.quarter):
            x = functional.conv2d(x, kernel.vector, stride=2, padding=1)
        return x.permute(0, 2, 3, 1)

    def _placed(self, side: int) -> Tensor:
        """[1, side, side, H]: the table of places, resized by areas where it becomes smaller."""
        table = self.positions.vector
        if table.shape[1] == side:
            return table
        planes = functional.interpolate(
            table.permute(0, 3, 1, 2).float(), (side, side), mode="bicubic", antialias=True
        )
        return planes.permute(0, 2, 3, 1).to(table.dtype)


class SamBlock(Layer):
    """Norm, attention, residual; norm, MLP, residual.

    Args:
        sizes: hidden size, and number of heads.
        side: patches of a side of the images that places are for.
        window: patches of a side of what sees itself; 0: the whole image.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int], *, side: int, window: int
    ) -> None:
        hidden, _ = sizes
        self.window = window
        self.attention_norm = LayerNorm(context, f"{name}.norm1", hidden, _EPS)
        self.attention = RelativeAttention(context, f"{name}.attn", sizes, window or side)
        self.mlp_norm = LayerNorm(context, f"{name}.norm2", hidden, _EPS)
        names = f"{name}.mlp.lin1", f"{name}.mlp.lin2"
        self.mlp = MLP(context, *names, hidden, 4 * hidden, "gelu")

    def __call__(self, x: Tensor) -> Tensor:
        """x [I, R, C, H] -> the same shape."""
        x = x + self._attended(self.attention_norm(x.flatten(0, 2)).view(x.shape))
        return x + self.mlp(self.mlp_norm(x.flatten(0, 2))).view(x.shape)

    def _attended(self, x: Tensor) -> Tensor:
        """Windows at the lower and right edge are filled up with zeros, which are seen as well."""
        if not self.window:
            return torch.cat([self.attention(image[None]) for image in x])
        side, window = x.shape[1], self.window
        more = -side % window
        wide = functional.pad(x, (0, 0, 0, more, 0, more))
        number = (side + more) // window
        cut = wide.view(len(x), number, window, number, window, -1).transpose(2, 3)
        found = torch.cat([self.attention(image.flatten(0, 1)) for image in cut])
        joined = found.view(cut.shape).transpose(2, 3).reshape(wide.shape)
        return joined[:, :side, :side]


class RelativeAttention(Layer):
    """Attention among all places of an image or window, with a table of how far rows and columns are.

    Args:
        sizes: hidden size, and number of heads.
        side: places of a side of what the tables are for.
    """

    def __init__(self, context: BuildContext, name: str, sizes: tuple[int, int], side: int) -> None:
        hidden, self.heads = sizes
        if hidden % self.heads:
            raise UnsupportedModel(
                f"config.json: vision_config: {hidden} numbers are not {self.heads} whole heads"
            )
        size = hidden // self.heads
        self.qkv = Linear(context, f"{name}.qkv", hidden, [Part(3 * hidden)], bias=True)
        self.out = Linear(context, f"{name}.proj", hidden, [Part(hidden)], bias=True)
        self.rows = Vector(f"{name}.rel_pos_h", 2 * side - 1, size)
        self.columns = Vector(f"{name}.rel_pos_w", 2 * side - 1, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, R, C, H] -> the same shape."""
        count, rows, columns, hidden = x.shape
        made = self.qkv(x.reshape(-1, hidden)).view(count, rows * columns, 3, self.heads, -1)
        query, key, value = made.permute(2, 0, 3, 1, 4)
        by_row, by_column = (
            distances(self.rows.vector, rows),
            distances(self.columns.vector, columns),
        )
        queries = query.reshape(count, self.heads, rows, columns, -1)
        step = max(1, _MOST_BIASES // (count * self.heads * columns * rows * columns))
        found = []
        parts = torch.split(queries, step, dim=2), torch.split(by_row, step)
        for own, near in zip(*parts, strict=True):
            down = torch.einsum("nhrcd,rkd->nhrck", own, near)
            across = torch.einsum("nhrcd,ckd->nhrck", own, by_column)
            bias = (down[..., None] + across[..., None, :]).flatten(4).flatten(2, 3)
            found.append(
                functional.scaled_dot_product_attention(
                    own.flatten(2, 3), key, value, attn_mask=bias
                )
            )
        seen = torch.cat(found, dim=2).transpose(1, 2).reshape(-1, hidden)
        return self.out(seen).view(x.shape)


def distances(table: Tensor, side: int) -> Tensor:
    """[side, side, D]: a table's row for each two places, by how far they are; the table is stretched to as
    many distances as there are."""
    number = 2 * side - 1
    if len(table) != number:
        stretched = functional.interpolate(table.T[None].float(), number, mode="linear")
        table = stretched[0].T.to(table.dtype)
    places = torch.arange(side, device=table.device)
    return table[places[:, None] - places + side - 1]


def _normed(x: Tensor, norm: LayerNorm) -> Tensor:
    """Channels of each place by themselves: x [I, H, R, C] -> the same shape."""
    last = x.permute(0, 2, 3, 1)
    return norm(last.reshape(-1, last.shape[-1])).view(last.shape).permute(0, 3, 1, 2)
