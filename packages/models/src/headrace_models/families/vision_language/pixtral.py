"""Pixtral, in LLaVA's frame and in Mistral's own files: an image of any size is its patches, or squares of
them, through a small MLP.

Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.merging import MergingProjector, merging_rules
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.pixtral import PixtralTower, feature_layer, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_EPS = 1e-5
"""Of the norm in front of a projector of Mistral's own files."""


class Pixtral(MediaDecoder):
    """An image is a vector for each of its patches, row by row."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        strategy = whole.get("vision_feature_select_strategy", "default")
        if strategy != "full":
            raise UnsupportedModel(
                f"config.json: vision_feature_select_strategy = {strategy!r}: must be full, as the tower "
                "has no vector beside its patches'"
            )
        self.tower = PixtralTower(
            context, part_of(whole, "vision_config"), _TOWER, last=feature_layer(whole, -2)
        )
        settings, hidden = Settings(whole), self.hidden_size()
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (self.tower.size, hidden, hidden),
            settings.activation("projector_hidden_act", default="gelu"),
            bias=settings.flag("multimodal_projector_bias", True),
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return self.tower.unused

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each, of any sizes.
        """
        states = self.tower([item["pixel_values"] for item in inputs])
        vectors = self.projector(torch.cat(states))
        return list(torch.split(vectors, [len(own) for own in states]))


class MistralsPixtral(MediaDecoder):
    """Mistral's own ``params.json`` says whether a norm and a product that joins squares of patches stand in
    front of the MLP: Pixtral 12B and Large have neither, Mistral Small 3.1 and later models both."""

    media_rules: ClassVar[Sequence[WeightRule]] = merging_rules(_TOWER, _PROJECTOR)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        self.tower = PixtralTower(context, part_of(whole, "vision_config"), _TOWER)
        self.projector = MergingProjector(
            context,
            _PROJECTOR,
            (self.tower.size, self.hidden_size()),
            merge=settings.optional_integer("spatial_merge_size"),
            eps=_EPS if settings.flag("projector_norm", False) else None,
            activation="gelu",
            bias=settings.flag("multimodal_projector_bias", True),
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each, of any sizes.
        """
        images = [item["pixel_values"] for item in inputs]
        return self.projector(self.tower(images), [self.tower.grid(image) for image in images])
