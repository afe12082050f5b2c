"""The tower of BLIP-2 and InstructBLIP: a ViT of Fang et al. 2022, arXiv:2211.07636."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vision_model"
_BLOCK = f"{_TOWER}.encoder.layers.{{}}"
_VISION: Mapping[str, Any] = {
    "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True,
}  # fmt: skip
"""Values that configs may leave out."""
TOWER_RULES = (
    WeightRule(f"{_TOWER}.embeddings.class_embedding", "tower.first.vector"),
    WeightRule(f"{_TOWER}.embeddings.position_embedding", "tower.positions.vector"),
    WeightRule(f"{_TOWER}.embeddings.patch_embedding", "tower.patches"),
    WeightRule(f"{_TOWER}.post_layernorm", "tower.last_norm"),
    WeightRule(f"{_BLOCK}.layer_norm1", "tower.layers.{}.attention_norm"),
    WeightRule(f"{_BLOCK}.self_attn.qkv", "tower.layers.{}.attention.qkv", split=()),
    WeightRule(f"{_BLOCK}.self_attn.projection", "tower.layers.{}.attention.out"),
    WeightRule(f"{_BLOCK}.layer_norm2", "tower.layers.{}.mlp_norm"),
    WeightRule(f"{_BLOCK}.mlp.fc1", "tower.layers.{}.mlp.up"),
    WeightRule(f"{_BLOCK}.mlp.fc2", "tower.layers.{}.mlp.down"),
)
"""Rules of a :class:`BlipTower`."""


class BlipTower(Layer):
    """Images of one size -> the states of their patches behind one of the whole.

    Args:
        stated: the part of the config.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any]) -> None:
        settings = Settings({**_VISION, **stated})
        self.size, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        states = (settings.integer("image_size") // self.patch) ** 2 + 1
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        name, eps = f"{_TOWER}.embeddings", settings.number("layer_norm_eps")
        kernel = (3, self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embedding", kernel, self.size, bias=True
        )
        self.first = Vector(f"{name}.class_embedding", 1, 1, self.size)
        self.positions = Vector(f"{name}.position_embedding", 1, states, self.size)
        self.layers = [
            _block(context, settings, _BLOCK.format(index), eps)
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.last_norm = LayerNorm(context, f"{_TOWER}.post_layernorm", self.size, eps)

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, states, H]."""
        count = len(images)
        flat = in_patches(images.to(self.dtype), self.patch)
        x = self.patches(flat.flatten(0, 1)).view(*flat.shape[:2], -1)
        x = torch.cat((self.first.vector.expand(count, 1, -1), x), dim=1) + self.positions.vector
        number, segments = x.shape[1], Segments.of([x.shape[1]] * count, x.device)
        x, residual = x.flatten(0, 1), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        x, _ = self.last_norm.add(x, residual)
        return x.view(count, number, -1)


def _block(context: BuildContext, settings: Settings, name: str, eps: float) -> VisionBlock:
    hidden = settings.integer("hidden_size")
    attention = VisionAttention(
        context,
        f"{name}.self_attn",
        hidden_size=hidden,
        num_heads=settings.integer("num_attention_heads"),
        bias=settings.flag("qkv_bias", True),
        out_bias=True,
        names=(("qkv",), "projection"),
    )
    sizes = hidden, settings.integer("intermediate_size")
    mlp = vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes)
    norms = [LayerNorm(context, f"{name}.layer_norm{which}", hidden, eps) for which in (1, 2)]
    return VisionBlock(norms[0], attention, norms[1], mlp)
