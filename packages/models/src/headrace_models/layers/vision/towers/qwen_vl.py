"""The tower of Qwen2-VL and Qwen2.5-VL: patches of images of any size, rotation in two dimensions, and a
merger that makes one vector of four neighbours.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923 (RMS norms, gated layers, windows).

Patches come in the order of the merger: four that become one vector are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.axes import frequencies, places, rotary_rows
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import Projector, vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS, _THETA = 1e-6, 10_000.0
_FUSED = (("qkv",), "proj")
_APART = (("q", "k", "v"), "proj")
"""Names of the attention's modules."""
Grid = tuple[int, int, int]
"""Patches of an item in time, height and width."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of both towers: their names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.q", f"{own}.attention.qkv", part=0),
        WeightRule(f"{block}.attn.k", f"{own}.attention.qkv", part=1),
        WeightRule(f"{block}.attn.v", f"{own}.attention.qkv", part=2),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{block}.mlp.gate_proj", f"{own}.mlp.gate_up", part=0),
        WeightRule(f"{block}.mlp.up_proj", f"{own}.mlp.gate_up", part=1),
        WeightRule(f"{block}.mlp.down_proj", f"{own}.mlp.down"),
        WeightRule(f"{source}.merger.ln_q", f"{target}.merger_norm"),
        WeightRule(f"{source}.merger.mlp.0", f"{target}.merger.up"),
        WeightRule(f"{source}.merger.mlp.2", f"{target}.merger.down"),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Order and company of the patches of a batch of items."""

    whole: Segments
    """Frames of items."""
    windows: Segments | None
    order: Tensor | None
    """[units]; the units of four patches window by window; None: as they come."""
    rotary: Tensor
    """[T, D], in that order."""


class QwenVLTower(Layer):
    """Patches -> a vector for every four of them.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        out_size: of a vector.
        second: the tower of Qwen2.5-VL.
        fused: queries, keys and values are stored together; Qwen2.5-Omni has them apart.
        merges: False: the states of patches are the result, as they come from the last block.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        out_size: int,
        *,
        second: bool,
        fused: bool = True,
        merges: bool = True,
    ) -> None:
        settings = Settings({**(_SECOND if second else _FIRST), **stated})
        hidden = settings.integer("hidden_size" if second else "embed_dim")
        self.heads, self.patch = settings.integer("num_heads"), settings.integer("patch_size")
        self.merge = settings.integer("spatial_merge_size")
        self.head_dim, self.ops = hidden // self.heads, context.ops
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.device = context.device
        if not self.head_dim or self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        channels = settings.integer("in_channels")
        frames = settings.integer("temporal_patch_size")
        kernel = (channels, frames, self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, hidden, bias=False
        )
        self.layers = [
            _block(
                context,
                settings,
                f"{name}.blocks.{index}",
                hidden,
                second=second,
                names=_FUSED if fused else _APART,
            )
            for index in range(settings.integer("depth", maximum=MAX_LAYERS))
        ]
        self.window = settings.integer("window_size") if second else 0
        self.full = set(settings.integers("fullatt_block_indexes")) if second else set()
        self.state_size = hidden
        self.merger_norm: RMSNorm | LayerNorm | None = None
        if not merges:
            return
        unit = hidden * self.merge**2
        norm = RMSNorm if second else LayerNorm
        self.merger_norm = norm(context, f"{name}.merger.ln_q", hidden, _EPS)
        inner, sizes = f"{name}.merger.mlp", (unit, unit, out_size)
        self.merger = Projector(context, f"{inner}.0", f"{inner}.2", sizes, "gelu")

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode items of any sizes at once; they do not see each other.

        Args:
            patches: [time * height * width, channels * frames * patch * patch] each.

        Returns:
            [time * height * width / merge ** 2, out_size] each; of states, [time * height * width, size].
        """
        layout = self._layout(grids)
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        per = self.merge**2
        if layout.order is not None:
            x = x.view(-1, per, x.shape[1])[layout.order].flatten(0, 1)
        residual = None
        for index, layer in enumerate(self.layers):
            wide = layout.windows is None or index in self.full
            segments = layout.whole if wide else layout.windows
            assert segments is not None
            x, residual = layer(x, residual, segments, layout.rotary)
        if self.merger_norm is None:
            states = x if residual is None else self.ops.add(x, residual)
            return list(torch.split(states, [t * h * w for t, h, w in grids]))
        normed, _ = self.merger_norm.add(x, residual)
        merged = self.merger(normed.reshape(-1, per * normed.shape[1]))
        if layout.order is not None:
            merged = merged[torch.argsort(layout.order)]
        return list(torch.split(merged, [t * h * w // per for t, h, w in grids]))

    def _layout(self, grids: Sequence[Grid]) -> _Layout:
        rotary = torch.cat([self._rotary(grid) for grid in grids])
        whole = Segments.of([h * w for t, h, w in grids for _ in range(t)], rotary.device)
        if not self.window:
            return _Layout(whole, None, None, rotary)
        per, first = self.merge**2, 0
        orders: list[Tensor] = []
        sizes: list[int] = []
        for grid in grids:
            order, own = self._windows(grid)
            orders.append(order + first)
            sizes += own
            first += len(order)
        order = torch.cat(orders)
        turned = rotary.view(-1, per, rotary.shape[1])[order].flatten(0, 1)
        return _Layout(whole, Segments.of(sizes, rotary.device), order, turned)

    def _rotary(self, grid: Grid) -> Tensor:
        """[T, D]: cosines and sines of patches, a quarter of the numbers by row and a quarter by column."""
        time, height, width = grid
        turning = frequencies(_THETA, self.head_dim // 4)
        rows = rotary_rows(places(height, width, self.merge), turning, turning)
        return rows.repeat(time, 1).to(self.device)

    def _windows(self, grid: Grid) -> tuple[Tensor, list[int]]:
        """Units of four patches of an item, window by window; and the windows' numbers of patches."""
        time, height, width = grid
        per, side = self.merge**2, self.window // self.merge // self.patch
        rows, columns = height // self.merge, width // self.merge
        units = torch.arange(time * rows * columns).view(time, rows, columns)
        found: list[Tensor] = []
        sizes: list[int] = []
        for frame in units:
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    window = frame[top : top + side, left : left + side].flatten()
                    found.append(window)
                    sizes.append(len(window) * per)
        return torch.cat(found).to(self.device), sizes


_FIRST: Mapping[str, Any] = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
}  # fmt: skip
_SECOND: Mapping[str, Any] = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "hidden_act": "silu", "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
"""Values that configs may leave out."""


def _block(
    context: BuildContext,
    settings: Settings,
    name: str,
    hidden: int,
    *,
    second: bool,
    names: tuple[tuple[str, ...], str],
) -> VisionBlock:
    attention = VisionAttention(
        context,
        f"{name}.attn",
        hidden_size=hidden,
        num_heads=settings.integer("num_heads"),
        names=names,
    )
    if second:
        return VisionBlock(
            RMSNorm(context, f"{name}.norm1", hidden, _EPS),
            attention,
            RMSNorm(context, f"{name}.norm2", hidden, _EPS),
            GatedMLP(
                context,
                f"{name}.mlp",
                hidden,
                settings.integer("intermediate_size"),
                settings.activation("hidden_act"),
                bias=True,
            ),
        )
    inner = int(hidden * settings.number("mlp_ratio"))
    return VisionBlock(
        LayerNorm(context, f"{name}.norm1", hidden, _EPS),
        attention,
        LayerNorm(context, f"{name}.norm2", hidden, _EPS),
        vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", (hidden, inner)),
    )
