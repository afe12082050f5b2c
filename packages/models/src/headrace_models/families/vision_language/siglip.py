"""SigLIP and SigLIP 2, of one resolution and of any (NaFlex): texts and images as vectors of one space.

Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025, arXiv:2502.14786.
``families/encoder/siglip.py`` has the text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.shared_space import SharedSpace
from headrace_models.layers.vision.towers.clip import TOWERS, ClipTower, Vector, tower_rules
from headrace_models.layers.vision.towers.naflex import NaflexTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _HEAD = "vision_model", "vision_model.head"


class AttentionPooling(Layer):
    """One learned query attends to an image's states, then ``x + mlp(norm(x))`` (Lee et al. 2019,
    arXiv:1810.00825). Letters: I images, S states of each, H hidden size."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        hidden = settings.integer("hidden_size")
        self.num_heads = settings.integer("num_attention_heads")
        self.probe = Vector(f"{_HEAD}.probe", 1, 1, hidden)
        name = f"{_HEAD}.attention"
        # Query, key and value of one product, as torch's own layer stores them.
        self.qkv = Linear(context, f"{name}.in_proj", hidden, [Part(3 * hidden)], bias=True)
        self.out = Linear(context, f"{name}.out_proj", hidden, [Part(hidden)], bias=True)
        eps = settings.number("layer_norm_eps", 1e-6)
        self.norm = LayerNorm(context, f"{_HEAD}.layernorm", hidden, eps)
        sizes = hidden, settings.integer("intermediate_size")
        self.mlp = vision_mlp(context, settings, f"{_HEAD}.mlp.fc1", f"{_HEAD}.mlp.fc2", sizes)

    def __call__(self, states: Tensor) -> Tensor:
        """states [I, S, H] -> [I, H]."""
        count, number, hidden = states.shape
        query = self.qkv(self.probe.vector.view(1, hidden))[:, :hidden]
        _, key, value = self.qkv(states.flatten(0, 1)).view(count, number, -1).chunk(3, dim=-1)
        found = functional.scaled_dot_product_attention(
            self._by_head(query.expand(count, 1, hidden)), self._by_head(key), self._by_head(value)
        )
        x = self.out(found.transpose(1, 2).reshape(count, hidden))
        return x + self.mlp(self.norm(x))

    def _by_head(self, x: Tensor) -> Tensor:
        """[I, S, H] -> [I, heads, S, H / heads]."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class Siglip(SharedSpace):
    """An image is what attention pooling makes of the tower's states."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_HEAD}.probe", "media_pooling.probe.vector"),
        WeightRule(f"{_HEAD}.attention.in_proj_weight", "media_pooling.qkv.weight"),
        WeightRule(f"{_HEAD}.attention.in_proj_bias", "media_pooling.qkv.bias"),
        WeightRule(f"{_HEAD}.attention.out_proj", "media_pooling.out"),
        WeightRule(f"{_HEAD}.layernorm", "media_pooling.norm"),
        WeightRule(f"{_HEAD}.mlp.fc1", "media_pooling.mlp.up"),
        WeightRule(f"{_HEAD}.mlp.fc2", "media_pooling.mlp.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        kind = {"model_type": "siglip_vision_model"}
        vision = {**kind, **part_of(whole, "vision_config")}
        self.make_tower(context, vision)
        settings = Settings({**TOWERS["siglip_vision_model"], **vision})
        if not settings.flag("vision_use_head", True):
            raise UnsupportedModel(
                "config.json: vision_config.vision_use_head = False: must be true"
            )
        self._check_size(context, settings.integer("hidden_size"))
        self.media_pooling = AttentionPooling(context, settings)

    def make_tower(self, context: BuildContext, vision: Mapping[str, Any]) -> None:
        """
        Args:
            vision: its part of the config.
        """
        self.tower = ClipTower(context, vision, _TOWER, final_norm=True)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        return torch.split(self.media_pooling(states), 1)

    def _check_size(self, context: BuildContext, size: int) -> None:
        """Raises: UnsupportedModel: texts and images have vectors of two sizes."""
        assert context.pooling is not None
        if size != context.pooling.embedding_size:
            raise UnsupportedModel(
                f"config.json: vision_config.hidden_size = {size}: must be {context.pooling.embedding_size}, "
                "the size of a text's vector (text_config.projection_size)"
            )


class Siglip2(Siglip):
    """SigLIP 2 NaFlex: images keep their shape."""

    tower: NaflexTower

    def make_tower(self, context: BuildContext, vision: Mapping[str, Any]) -> None:
        self.tower = NaflexTower(context, vision, _TOWER)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] each, and ``spatial_shapes`` [1, 2]: rows
                and columns of patches.
        """
        grids = [(rows, columns) for x in inputs for rows, columns in x["spatial_shapes"].tolist()]
        states = self.tower.packed(torch.cat([x["pixel_values"] for x in inputs]), grids)
        images = torch.split(states, [rows * columns for rows, columns in grids])
        return [self.media_pooling(own[None]) for own in images]
