"""Idefics3 and SmolVLM: tiles of an image through SigLIP's tower, of whose patches several become a vector.

Laurençon et al. 2024, arXiv:2408.12637; Marafioti et al. 2025, arXiv:2504.05299.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import tower_rules
from headrace_models.layers.vision.towers.fractional import FractionalTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _CONNECTOR = "vision_model", "connector.modality_projection.proj"
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 32,
}  # fmt: skip
"""Values that configs may leave out."""


_PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Modality -> name of the model's input."""


class Idefics3(MediaDecoder):
    """An image is one tile, or tiles and a small picture of the whole; a tile is a run of vectors."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(_CONNECTOR, "connector"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = {**_VISION, **part_of(whole, "vision_config"), "model_type": "siglip_vision_model"}
        self.tower = FractionalTower(context, stated, _TOWER, final_norm=True)
        self.factor = Settings(whole).integer("scale_factor", 2)
        if self.tower.side % self.factor:
            raise UnsupportedModel(
                f"config.json: scale_factor = {self.factor}: must divide the {self.tower.side} patches of a "
                "side of an image"
            )
        size = self.tower.positions.size * self.factor**2
        self.connector = Linear(context, _CONNECTOR, size, [Part(self.hidden_size())])

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [tiles, 3, side, side] each, of one side; of videos
                ``pixel_values_videos``.
        """
        pixels = [item[_PIXELS[modality]] for item in inputs]
        side = pixels[0].shape[-1] // self.tower.patch
        vectors = joined(self.tower(torch.cat(pixels)), side, self.factor)
        projected = self.connector(vectors.flatten(0, 1))
        return torch.split(projected, [len(tiles) * vectors.shape[1] for tiles in pixels])


class SmolVLM(Idefics3):
    """A video's frame is a tile, too."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
