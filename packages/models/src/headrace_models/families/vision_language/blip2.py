"""BLIP-2: a ViT's states, of which a Q-Former makes a few vectors, in front of OPT.

Li et al. 2023, arXiv:2301.12597; the tower is that of Fang et al. 2022, arXiv:2211.07636.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.qformer import QFormer, qformer_rules
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.clip import Vector
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTION = "vision_model", "language_projection"
_FORMER = "qformer", "query_tokens"
_BLOCK = f"{_TOWER}.encoder.layers.{{}}"
_VISION: Mapping[str, Any] = {
    "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True,
}  # fmt: skip
"""Values that configs may leave out."""


class Blip2(MediaDecoder):
    """An image is so many vectors as there are queries."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
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
        *qformer_rules(*_FORMER, "qformer"),
        WeightRule(_PROJECTION, "projection"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = BlipTower(context, part_of(whole, "vision_config"))
        number = Settings(whole).integer("num_query_tokens", 32)
        stated = part_of(whole, "qformer_config")
        self.qformer = QFormer(context, "qformer_config", stated, _FORMER, number, self.tower.size)
        parts = [Part(self.hidden_size())]
        self.projection = Linear(context, _PROJECTION, self.qformer.size, parts, bias=True)

    def unread_weights(self) -> Mapping[str, str]:
        """The Q-Former's layers for texts, with which it was trained."""
        layers = r"encoder\.layer\.\d+\.(intermediate|output)"
        return {rf"qformer\.(embeddings|{layers})\..*": "reads texts, which are not given to it"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        found = self.qformer(self.tower(torch.stack([item["pixel_values"] for item in inputs])))
        return list(self.projection(found.flatten(0, 1)).view(*found.shape[:2], -1))


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
