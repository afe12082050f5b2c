"""Mistral Small 3.1, Ministral 3 and LightOnOCR: Pixtral's tower, and a square of its patches is a vector.

Agrawal et al. 2024, arXiv:2410.07073 (tower).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.merging import MergingProjector, merging_rules
from headrace_models.layers.vision.towers.pixtral import PixtralTower, feature_layer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class Mistral3(MediaDecoder):
    """A square of an image's patches is a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = merging_rules(
        "vision_tower", "multi_modal_projector"
    )
    names: ClassVar[tuple[str, str]] = ("vision_tower", "multi_modal_projector")
    """Of the tower and the projector, as checkpoints spell them."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings that count whatever the config says."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**whole, **self.fixed})
        tower, projector = self.names
        self.tower = PixtralTower(
            context,
            part_of(whole, "vision_config"),
            tower,
            last=feature_layer(settings.config, -1),
        )
        self.projector = MergingProjector(
            context,
            projector,
            (self.tower.size, self.hidden_size()),
            merge=settings.integer("spatial_merge_size", 2),
            eps=self.settings.number("rms_norm_eps", 1e-6),
            activation=settings.activation("projector_hidden_act", default="gelu"),
            bias=settings.flag("multimodal_projector_bias", False),
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
        images = [item["pixel_values"] for item in inputs]
        return self.projector(self.tower(images), [self.tower.grid(image) for image in images])


class LightOnOCR(Mistral3):
    """The same under other names."""

    media_rules: ClassVar[Sequence[WeightRule]] = merging_rules(
        "vision_encoder", "vision_projection"
    )
    names: ClassVar[tuple[str, str]] = ("vision_encoder", "vision_projection")
    fixed: ClassVar[Mapping[str, Any]] = {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    }
