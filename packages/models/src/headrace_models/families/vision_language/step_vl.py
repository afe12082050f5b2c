"""Step3-VL 10B: Perception Encoder's tower in front of Qwen 3.

StepFun 2026, STEP3-VL-10B; Bolya et al. 2025, arXiv:2504.13181, for the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.native_size.stretched import stretched
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import frequencies, places
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
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
_BLOCK, _OWN = f"{_TOWER}.transformer.resblocks.{{}}", "tower.layers.{}"
_DOWN = (f"{_TOWER}.vit_downsampler1", f"{_TOWER}.vit_downsampler2")


class StepVL(StepImages):
    """Step3-VL 10B."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.conv1", "tower.patches"),
        WeightRule(f"{_TOWER}.positional_embedding", "tower.positions.vector"),
        WeightRule(f"{_TOWER}.ln_pre", "tower.first_norm"),
        WeightRule(f"{_BLOCK}.ln_1", f"{_OWN}.attention_norm"),
        WeightRule(
            f"{_BLOCK}.attn.in_proj_weight", f"{_OWN}.attention.qkv.weight", split=ALL_PARTS
        ),
        WeightRule(f"{_BLOCK}.attn.in_proj_bias", f"{_OWN}.attention.qkv.bias", split=ALL_PARTS),
        WeightRule(f"{_BLOCK}.attn.out_proj", f"{_OWN}.attention.out"),
        WeightRule(f"{_BLOCK}.ls_1.gamma", f"{_OWN}.attention_scale.vector"),
        WeightRule(f"{_BLOCK}.ln_2", f"{_OWN}.mlp_norm"),
        WeightRule(f"{_BLOCK}.mlp.c_fc", f"{_OWN}.mlp.up"),
        WeightRule(f"{_BLOCK}.mlp.c_proj", f"{_OWN}.mlp.down"),
        WeightRule(f"{_BLOCK}.ls_2.gamma", f"{_OWN}.mlp_scale.vector"),
        *downsampler_rules(_DOWN, "downsampler"),
        StepImages.projector_rule,
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "width": 1536, "layers": 47, "heads": 16, "image_size": 728, "patch_size": 14,
        "mlp_ratio": 8960 / 1536, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    }  # fmt: skip
    default_bias: ClassVar[bool] = False

    def make_tower(self, context: BuildContext, settings: Settings, whole: Settings) -> int:
        for key, served in (
            ("use_cls_token", False), ("use_ln_pre", True), ("use_ln_post", False),
            ("use_abs_posemb", True), ("use_rope2d", True), ("num_channels", 3),
            ("rope_theta_rescale_factor", 1.0),
        ):  # fmt: skip
            settings.refuse(key, served)
        self.tower = _Tower(context, settings)
        size = self.tower.size
        self.downsampler = Downsampler(_DOWN, (size, 2 * size, 4 * size))
        return 4 * size

    def states(self, pictures: Tensor) -> Tensor:
        return self.downsampler(self.tower(pictures), side_of(pictures, self.tower.patch))


class _Tower(Layer):
    """Learned positions, stretched to smaller pictures, and rotation by column and row."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        self.size, heads = settings.integer("width"), settings.integer("heads")
        self.patch = settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        self.head_dim = self.size // heads
        if not self.head_dim or self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        self.theta = settings.positive("rope_theta", 10_000.0)
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel, name = (3, self.patch, self.patch), f"{_TOWER}.conv1"
        self.patches = PatchEmbedding(context, name, kernel, self.size, bias=False)
        self.positions = Vector(f"{_TOWER}.positional_embedding", self.side**2, self.size)
        eps = settings.number("layer_norm_eps")
        self.first_norm = LayerNorm(context, f"{_TOWER}.ln_pre", self.size, eps)
        self.layers = [
            _Block(context, settings, f"{_TOWER}.transformer.resblocks.{index}")
            for index in range(settings.integer("layers", maximum=MAX_LAYERS))
        ]

    def __call__(self, pictures: Tensor) -> Tensor:
        """pictures [I, 3, side, side] -> [I, patches, D]."""
        flat = in_patches(pictures.to(self.dtype), self.patch)
        count, number, _ = flat.shape
        x = self.patches(flat.flatten(0, 1)).view(count, number, -1)
        side = side_of(pictures, self.patch)
        x = self.first_norm((x + self._placed(side)).flatten(0, 1))
        segments, residual = Segments.of([number] * count, x.device), None
        rotary = self._rotary(side).repeat(count, 1).to(x.device)
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        if residual is not None:
            x = self.ops.add(x, residual)
        return x.view(count, number, -1)

    def _placed(self, side: int) -> Tensor:
        """[side * side, D]: the table, read in straight lines between its places."""
        table = self.positions.vector
        if side == self.side:
            return table
        plane = table.view(self.side, self.side, -1)
        return stretched(plane, side, side, cubic=False).flatten(0, 1).to(table.dtype)

    def _rotary(self, side: int) -> Tensor:
        """[side * side, head_dim]: half cosines, half sines; in each first by column, then by row."""
        angles = places(side, side).float()[:, :, None] * frequencies(
            self.theta, self.head_dim // 4
        )
        angles = angles.flip(1).flatten(1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


class _Block(VisionBlock):
    """Norm, attention, scale, residual; norm, MLP, scale, residual."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, eps = settings.integer("width"), settings.number("layer_norm_eps")
        between = int(size * settings.positive("mlp_ratio"))
        super().__init__(
            LayerNorm(context, f"{name}.ln_1", size, eps),
            VisionAttention(
                context,
                f"{name}.attn",
                hidden_size=size,
                num_heads=settings.integer("heads"),
                names=(("in_proj",), "out_proj"),
                interleaved=True,
            ),
            LayerNorm(context, f"{name}.ln_2", size, eps),
            vision_mlp(
                context, settings, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", (size, between)
            ),
        )
        self.attention_scale = Vector(f"{name}.ls_1.gamma", size)
        self.mlp_scale = Vector(f"{name}.ls_2.gamma", size)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        segments: Segments,
        rotary: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`VisionBlock`."""
        x, stream = self.attention_norm.add(x, residual)
        x = self.attention(x, segments, rotary) * self.attention_scale.vector
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x) * self.mlp_scale.vector, stream
