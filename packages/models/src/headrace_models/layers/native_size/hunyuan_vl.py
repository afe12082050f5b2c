"""The tower of HunyuanOCR: patches of images of any size with learned positions that are stretched to it, and
a convolution that makes one vector of four neighbours, with learned vectors at the ends of rows and images.

Tencent 2025, HunyuanOCR, arXiv:2511.19575.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.native_size.stretched import stretched
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.axes import places
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.clip import Vector
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_NAMES = (("q_proj", "k_proj", "v_proj"), "o_proj")
_MODES = {"bilinear": False, "bicubic": True}
"""Ways to stretch positions -> by cubic convolution."""
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "max_image_size": 2048,
    "hidden_act": "gelu", "rms_norm_eps": 1e-5, "interpolate_mode": "bilinear",
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`HunYuanTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.layers.{{}}", f"{target}.layers.{{}}"
    merger, joined = f"{source}.perceive", f"{target}.merger"
    return (
        WeightRule(f"{source}.embeddings.patch_embedding", f"{target}.patches"),
        WeightRule(f"{source}.embeddings.position_embedding", f"{target}.positions"),
        WeightRule(f"{block}.input_layernorm", f"{own}.attention_norm"),
        WeightRule(f"{block}.self_attn.q_proj", f"{own}.attention.qkv", part=0),
        WeightRule(f"{block}.self_attn.k_proj", f"{own}.attention.qkv", part=1),
        WeightRule(f"{block}.self_attn.v_proj", f"{own}.attention.qkv", part=2),
        WeightRule(f"{block}.self_attn.o_proj", f"{own}.attention.out"),
        WeightRule(f"{block}.post_attention_layernorm", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.dense_h_to_4h", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.dense_4h_to_h", f"{own}.mlp.down"),
        WeightRule(f"{merger}.before_rms", f"{joined}.before"),
        WeightRule(f"{merger}.proj.0", f"{joined}.squares"),
        WeightRule(f"{merger}.proj.2", f"{joined}.wide"),
        WeightRule(f"{merger}.mlp", f"{joined}.projection"),
        WeightRule(f"{merger}.after_rms", f"{joined}.after"),
        *(
            WeightRule(f"{merger}.image_{name}", f"{joined}.{name}.vector")
            for name in ("newline", "begin", "end")
        ),
    )


class HunYuanMerger(Layer):
    """States of an image -> a vector for every four of them, one at the end of each row, one in front of all
    and one behind.

    Args:
        name: as the checkpoint spells it.
        size: of a state.
        out_size: of a vector.
        merge: states of a side of the square that becomes a vector.
    """

    def __init__(
        self, context: BuildContext, name: str, size: int, out_size: int, settings: Settings
    ) -> None:
        merge, eps = settings.integer("spatial_merge_size"), settings.number("rms_norm_eps")
        self.merge, self.ops = merge, context.ops
        self.activation = settings.activation("hidden_act")
        self.before = RMSNorm(context, f"{name}.before_rms", size, eps)
        self.squares = PatchEmbedding(
            context, f"{name}.proj.0", (size, merge, merge), 2 * size, bias=True
        )
        self.wide = PatchEmbedding(context, f"{name}.proj.2", (2 * size, 1, 1), 4 * size, bias=True)
        self.projection = Linear(context, f"{name}.mlp", 4 * size, [Part(out_size)], bias=True)
        self.newline = Vector(f"{name}.image_newline", 4 * size)
        self.begin, self.end = (Vector(f"{name}.image_{end}", out_size) for end in ("begin", "end"))
        self.after = RMSNorm(context, f"{name}.after_rms", out_size, eps)

    def __call__(self, states: Tensor, rows: int) -> Tensor:
        """states [T, size], square by square -> [rows * (columns + 1) + 2, out_size].

        Args:
            rows: of squares.
        """
        x = self.before(states)
        squares = x.view(-1, self.merge**2, x.shape[1]).transpose(1, 2).flatten(1)
        wide = self.wide(self.ops.activation(self.squares(squares), self.activation))
        lines = wide.view(rows, -1, wide.shape[1])
        ends = self.newline.vector.expand(rows, 1, -1)
        made = self.projection(torch.cat((lines, ends), dim=1).flatten(0, 1))
        first, last = self.begin.vector[None], self.end.vector[None]
        return self.after(torch.cat((first, made, last)))


class HunYuanTower(Layer):
    """Patches -> vectors of the decoder.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        out_size: of a vector.
    """

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.cubic = _is_cubic(settings)
        size, patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel = (settings.integer("num_channels"), patch, patch)
        embed = f"{name}.embeddings"
        self.patches = PatchEmbedding(context, f"{embed}.patch_embedding", kernel, size, bias=True)
        self.side = settings.integer("max_image_size") // patch
        table = f"{embed}.position_embedding"
        self.positions = Embedding(context, table, self.side**2 + 1, size)
        self.layers = [
            _block(context, settings, f"{name}.layers.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.merger = HunYuanMerger(context, f"{name}.perceive", size, out_size, settings)

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode images of any sizes at once; they do not see each other.

        Args:
            patches: [height * width, channels * patch * patch] each, square by square.

        Returns:
            [rows * (columns + 1) + 2, out_size] each, of the rows and columns of squares.
        """
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        counts = [height * width for _, height, width in grids]
        segments = Segments.of(counts, x.device)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        states = torch.split(x if residual is None else self.ops.add(x, residual), counts)
        return [
            self.merger(own, height // self.merger.merge)
            for own, (_, height, _) in zip(states, grids, strict=True)
        ]

    def _positions(self, grid: Grid) -> Tensor:
        """[T, size] float32: the table without its first row, stretched to an image."""
        _, height, width = grid
        table = self.positions.weight[1:].view(self.side, self.side, -1)
        rows, columns = places(height, width, self.merger.merge).to(table.device).unbind(-1)
        return stretched(table, height, width, cubic=self.cubic)[rows, columns]


def _is_cubic(settings: Settings) -> bool:
    """Raises: UnsupportedModel: positions are stretched in another way."""
    mode = settings.config["interpolate_mode"]
    if mode not in _MODES:
        raise UnsupportedModel(
            f"config.json: vision_config.interpolate_mode = {mode!r}: must be one of "
            f"{', '.join(_MODES)}"
        )
    return _MODES[mode]


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
    inner = (size, settings.integer("intermediate_size"))
    attention = VisionAttention(
        context,
        f"{name}.self_attn",
        hidden_size=size,
        num_heads=settings.integer("num_attention_heads"),
        names=_NAMES,
    )
    up, down = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
    return VisionBlock(
        LayerNorm(context, f"{name}.input_layernorm", size, eps),
        attention,
        LayerNorm(context, f"{name}.post_attention_layernorm", size, eps),
        vision_mlp(context, settings, up, down, inner),
    )
