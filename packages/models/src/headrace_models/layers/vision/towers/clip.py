"""The towers of CLIP and of SigLIP: patches of an image of one size, learned positions, pre-norm blocks.

Radford et al. 2021, arXiv:2103.00020; Zhai et al. 2023, arXiv:2303.15343. CLIP has a vector of its own in
front of the patches, and a norm before its first block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, block_rules, pre_norm_block
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_CLIP: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_SIGLIP: Mapping[str, Any] = {
    **_CLIP, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Values that configs may leave out."""
TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": _CLIP,
    "siglip_vision_model": _SIGLIP,
}
"""``model_type`` of a tower's config -> its defaults."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`ClipTower`: its names in the checkpoint and in the model."""
    return (
        WeightRule(f"{source}.embeddings.class_embedding", f"{target}.first.vector"),
        WeightRule(f"{source}.embeddings.patch_embedding", f"{target}.patches"),
        WeightRule(f"{source}.embeddings.position_embedding", f"{target}.positions"),
        WeightRule(f"{source}.pre_layrnorm", f"{target}.first_norm"),
        WeightRule(f"{source}.post_layernorm", f"{target}.last_norm"),
        *block_rules(f"{source}.encoder.layers.{{}}", f"{target}.layers.{{}}"),
    )


class Vector(WeightLayer):
    """One vector, or several of one shape, stored under its own name."""

    vector: Tensor

    def __init__(self, name: str, *shape: int) -> None:
        self.name, self.shape = name, shape

    def slots(self) -> Mapping[str, Slot]:
        return {"vector": Slot(self.shape)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.vector = tensors["vector"]


class ClipTower(Layer):
    """Images of one size -> the states of their patches.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        last: the layer whose output is wanted, counted as transformers counts hidden states: 0 is the
            blocks' input, -1 the last block's output.
        final_norm: the last norm, behind the last block.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        *,
        last: int = -1,
        final_norm: bool = False,
    ) -> None:
        kind = str(stated.get("model_type", "clip_vision_model"))
        if kind not in TOWERS:
            raise UnsupportedModel(f"config.json: vision_config.model_type = {kind!r}: is unknown")
        settings = Settings({**TOWERS[kind], **stated})
        hidden, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.image_size = settings.integer("image_size")
        self.side = self.image_size // self.patch
        num_layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        wanted = last if last >= 0 else num_layers + 1 + last
        if not 0 <= wanted <= num_layers or (final_norm and wanted < num_layers):
            raise UnsupportedModel(
                f"config.json: vision_feature_layer = {last}: the tower has {num_layers} layers"
            )
        self.is_clip = kind == "clip_vision_model"
        self.num_unused = num_layers - wanted
        self.num_layers = num_layers
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        eps = settings.number("layer_norm_eps", 1e-5)
        inner = f"{name}.embeddings"
        kernel = (3, self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{inner}.patch_embedding", kernel, hidden, bias=not self.is_clip
        )
        positions = self.side**2 + int(self.is_clip)
        self.positions = Embedding(context, f"{inner}.position_embedding", positions, hidden)
        if self.is_clip:
            self.first = Vector(f"{inner}.class_embedding", hidden)
            self.first_norm = LayerNorm(context, f"{name}.pre_layrnorm", hidden, eps)
        self.layers = [
            pre_norm_block(context, settings, f"{name}.encoder.layers.{index}", eps)
            for index in range(wanted)
        ]
        self.last_norm = (
            LayerNorm(context, f"{name}.post_layernorm", hidden, eps) if final_norm else None
        )

    @property
    def num_states(self) -> int:
        """States of an image."""
        return self.side**2 + int(self.is_clip)

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, height, width] -> [I, states, H]: CLIP's own vector first, then patch by patch."""
        count = images.shape[0]
        flat = in_patches(images.to(self.dtype), self.patch)
        x = self.patches(flat.flatten(0, 1)).view(*flat.shape[:2], -1)
        if self.is_clip:
            first = self.first.vector.expand(count, 1, -1)
            x = torch.cat((first, x), dim=1)
        number = x.shape[1]
        x = (x + self.placed(images.shape[-1] // self.patch)).flatten(0, 1)
        if self.is_clip:
            x = self.first_norm(x)
        segments, residual = Segments.of([number] * count, x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        if self.last_norm is not None:
            x, _ = self.last_norm.add(x, residual)
        elif residual is not None:
            x = self.ops.add(x, residual)
        return x.view(count, number, -1)

    def placed(self, side: int) -> Tensor:
        """[states, H]: what tells the places of an image's states.

        Args:
            side: patches in a row of the image, and in a column.
        """
        return self.positions.weight
