"""MoonViT, the tower of Kimi-VL and Kimi K2.5: patches of images of any size, learned positions that are
stretched to it, and rotation in two dimensions, whose pairs turn by column and row in turns.

Kimi Team 2025, arXiv:2504.07491; Kimi Team 2026, arXiv:2602.02276.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.native_size.stretched import PositionTable, stretched
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import frequencies, places
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.patches import PatchEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS, _THETA = 1e-5, 10_000.0
_ACTIVATION = "gelu_tanh"
_FUSED = (("wqkv",), "wo")
_OLD = "vt_"
"""Beginning of the names of the tower's sizes in configs of Kimi K2.5."""
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64,
}  # fmt: skip
"""Values that configs may leave out."""
Grid = tuple[int, int, int]
"""Frames that see each other, and rows and columns of the patches of one."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`MoonVit`: its names in the checkpoint and in the model."""
    block, own = f"{source}.encoder.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.patch_embed.pos_emb", f"{target}.positions"),
        WeightRule(f"{block}.norm0", f"{own}.attention_norm"),
        WeightRule(f"{block}.wqkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.wo", f"{own}.attention.out"),
        WeightRule(f"{block}.norm1", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc0", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.down"),
        WeightRule(f"{source}.encoder.final_layernorm", f"{target}.final_norm"),
    )


class MoonVit(Layer):
    """Patches of images, and of frames that see each other -> their states, those of each square of four one
    after the other.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **_plain_names(stated)})
        self.size, heads = (settings.integer(key) for key in ("hidden_size", "num_attention_heads"))
        self.head_dim, patch = self.size // heads, settings.integer("patch_size")
        self.merge = _side_of_square(stated)
        if not self.head_dim or self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", (3, patch, patch), self.size, bias=True
        )
        table = settings.integer("pos_emb_height"), settings.integer("pos_emb_width"), self.size
        self.positions = PositionTable(f"{name}.patch_embed.pos_emb", table)
        self.layers = [
            _block(context, settings, f"{name}.encoder.blocks.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.encoder.final_layernorm", self.size, _EPS)

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """Encode items of any sizes at once; they do not see each other.

        Args:
            patches: [frames * rows * columns, 3 * patch * patch] each, row by row.

        Returns:
            [all patches, size].
        """
        orders = [self._order(grid) for grid in grids]
        flat = [own[order.to(own.device)] for own, order in zip(patches, orders, strict=True)]
        x = self.patches(torch.cat(flat).to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        rotary = torch.cat([self._rotary(grid) for grid in grids]).to(x.device)
        segments = Segments.of([math.prod(grid) for grid in grids], x.device)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        return self.final_norm.add(x, residual)[0]

    def _order(self, grid: Grid) -> Tensor:
        """Patches square by square, as indices of them row by row."""
        frames, rows, columns = grid
        order = self._squares(grid)
        return (order + torch.arange(frames)[:, None] * rows * columns).flatten()

    def _squares(self, grid: Grid) -> Tensor:
        """The same of one frame."""
        rows, columns = places(*grid[1:], self.merge).unbind(-1)
        return rows * grid[2] + columns

    def _positions(self, grid: Grid) -> Tensor:
        """[T, size]: the table, stretched to a frame; frames of a video have a wave of their number more."""
        table = self.positions.weight
        frame = stretched(table, *grid[1:]).flatten(0, 1)[self._squares(grid).to(table.device)]
        if grid[0] == 1:
            return frame
        angles = torch.arange(grid[0])[:, None] * frequencies(_THETA, self.size // 2)
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1).to(table.device)
        return (frame + waves[:, None]).flatten(0, 1)

    def _rotary(self, grid: Grid) -> Tensor:
        """[T, D]: cosines and sines of patches; angles by column and by row take turns."""
        turning = frequencies(_THETA, self.head_dim // 4)
        by_axis = places(*grid[1:], self.merge).float()[:, :, None] * turning
        angles = by_axis.flip(1).transpose(1, 2).flatten(1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).repeat(grid[0], 1)


def _plain_names(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The tower's part of a config, in one spelling of three."""
    return {key.removeprefix(_OLD).removeprefix("init_"): stated[key] for key in stated}


def _side_of_square(stated: Mapping[str, Any]) -> int:
    """Patches of a side of the square that becomes a vector.

    Raises: UnsupportedModel: it is no square.
    """
    kernel = stated.get("merge_kernel_size", (2, 2))
    sides = list(kernel) if isinstance(kernel, list | tuple) else [kernel, kernel]
    if len(sides) != 2 or type(sides[0]) is not int or sides[0] != sides[1] or sides[0] < 1:
        raise UnsupportedModel(
            f"config.json: vision_config.merge_kernel_size = {kernel!r}: must be two equal sizes"
        )
    side: int = sides[0]
    return side


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden, inner = settings.integer("hidden_size"), settings.integer("intermediate_size")
    attention = VisionAttention(
        context,
        name,
        hidden_size=hidden,
        num_heads=settings.integer("num_attention_heads"),
        names=_FUSED,
        interleaved=True,
    )
    return VisionBlock(
        LayerNorm(context, f"{name}.norm0", hidden, _EPS),
        attention,
        LayerNorm(context, f"{name}.norm1", hidden, _EPS),
        MLP(context, f"{name}.mlp.fc0", f"{name}.mlp.fc1", hidden, inner, _ACTIVATION),
    )
