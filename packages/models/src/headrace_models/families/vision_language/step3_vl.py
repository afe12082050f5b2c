"""Step 3: CLIP's tower with norms behind its layers, in front of Step 3's mixture of experts.

StepFun 2025, arXiv:2507.19427.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.step_tiles import (
    Downsampler,
    StepImages,
    downsampler_rules,
    side_of,
)
from headrace_models.layers.vision.towers.clip import Vector
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vision_model"
_INNER = f"{_TOWER}.embeddings"
_BLOCK, _OWN = f"{_TOWER}.transformer.layers.{{}}", "tower.layers.{}"
_DOWN = ("vit_downsampler", "vit_downsampler2")
_FIRST = 4
"""Times that the first vector stands in front of the patches."""
_EPS = 1e-6
"""Of the blocks' norms, whatever the config says."""


class Step3VL(StepImages):
    """Step 3."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_INNER}.class_embedding", "tower.first.vector"),
        WeightRule(f"{_INNER}.patch_embedding", "tower.patches"),
        WeightRule(f"{_INNER}.position_embedding", "tower.positions"),
        WeightRule(f"{_BLOCK}.self_attn.qkv_proj", f"{_OWN}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_BLOCK}.self_attn.out_proj", f"{_OWN}.attention.out"),
        WeightRule(f"{_BLOCK}.layer_norm1", f"{_OWN}.attention_out_norm"),
        WeightRule(f"{_BLOCK}.mlp.fc1", f"{_OWN}.mlp.up"),
        WeightRule(f"{_BLOCK}.mlp.fc2", f"{_OWN}.mlp.down"),
        WeightRule(f"{_BLOCK}.layer_norm2", f"{_OWN}.mlp_out_norm"),
        *downsampler_rules(_DOWN, "downsampler"),
        StepImages.projector_rule,
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1792, "intermediate_size": 3072, "output_hidden_size": 4096,
        "num_hidden_layers": 63, "num_attention_heads": 16, "image_size": 728, "patch_size": 14,
        "hidden_act": "quick_gelu",
    }  # fmt: skip
    default_bias: ClassVar[bool] = True

    def make_tower(self, context: BuildContext, settings: Settings, whole: Settings) -> int:
        settings.refuse("num_channels", 3)
        self.tower = _Tower(context, settings)
        between = settings.integer("output_hidden_size")
        step = whole.integer("understand_projector_stride", 1)
        sizes = self.tower.size, between, 2 * between
        self.downsampler = Downsampler(_DOWN, sizes, (2, step, 0))
        return 2 * between

    def states(self, pictures: Tensor) -> Tensor:
        return self.downsampler(self.tower(pictures), side_of(pictures, self.tower.patch))


class _Tower(Layer):
    """Learned positions, by cubic convolution for smaller pictures."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        self.size, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel = (3, self.patch, self.patch)
        name = f"{_INNER}.patch_embedding"
        self.patches = PatchEmbedding(context, name, kernel, self.size, bias=True)
        self.first = Vector(f"{_INNER}.class_embedding", 1, self.size)
        number, name = self.side**2 + 1, f"{_INNER}.position_embedding"
        self.positions = Embedding(context, name, number, self.size)
        self.layers = [
            _Block(context, settings, f"{_TOWER}.transformer.layers.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]

    def __call__(self, pictures: Tensor) -> Tensor:
        """pictures [I, 3, side, side] -> [I, patches, D]."""
        flat = in_patches(pictures.to(self.dtype), self.patch)
        count = len(flat)
        x = self.patches(flat.flatten(0, 1)).view(count, flat.shape[1], -1)
        first, others = self._placed(side_of(pictures, self.patch))
        begin = (self.first.vector + first).expand(count, _FIRST, -1)
        x = torch.cat((begin, x + others), dim=1)
        number = x.shape[1]
        x, segments = x.flatten(0, 1), Segments.of([number] * count, x.device)
        for layer in self.layers:
            x = layer(x, segments)
        return x.view(count, number, -1)[:, _FIRST:]

    def _placed(self, side: int) -> tuple[Tensor, Tensor]:
        """[1, D] of the first vector and [side * side, D] of patches."""
        table = self.positions.weight
        first, others = table[:1], table[1:]
        if side == self.side:
            return first, others
        plane = others.float().T.view(1, -1, self.side, self.side)
        found = functional.interpolate(plane, (side, side), mode="bicubic", antialias=True)
        return first, found[0].flatten(1).T.to(table.dtype)


class _Block(Layer):
    """Attention, norm, residual; MLP, norm, residual."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size = settings.integer("hidden_size")
        self.ops = context.ops
        self.attention = VisionAttention(
            context,
            f"{name}.self_attn",
            hidden_size=size,
            num_heads=settings.integer("num_attention_heads"),
            names=(("qkv_proj",), "out_proj"),
        )
        self.attention_out_norm = LayerNorm(context, f"{name}.layer_norm1", size, _EPS)
        sizes = (size, settings.integer("intermediate_size"))
        self.mlp = vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes)
        self.mlp_out_norm = LayerNorm(context, f"{name}.layer_norm2", size, _EPS)

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x [T, D] -> [T, D]."""
        x = self.ops.add(self.attention_out_norm(self.attention(x, segments)), x)
        return self.ops.add(self.mlp_out_norm(self.mlp(x)), x)
