"""MiniCPM-V 2.6, 4.0 and 4.5: SigLIP's tower on slices of any shape, and a resampler that makes as
many vectors of each.

Yao et al. 2024, arXiv:2408.01800.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.resampler import Resampler, resampler_rules
from headrace_models.layers.vision.towers.clip import tower_rules
from headrace_models.layers.vision.towers.fractional import FractionalTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _RESAMPLER = "vpm", "resampler"
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 980, "patch_size": 14,
}  # fmt: skip
"""Values that configs may leave out."""


_PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Modality -> name of the model's input."""


class MiniCPMV(MediaDecoder):
    """An image is a small picture of the whole, and slices of it, a video is frames; each is as many
    vectors."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *resampler_rules(_RESAMPLER, "resampler"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        stated = {**_VISION, **part_of(whole, "vision_config"), "model_type": "siglip_vision_model"}
        if settings.flag("drop_vision_last_layer", True):
            layers = Settings(stated).integer("num_hidden_layers", minimum=2)
            stated["num_hidden_layers"] = layers - 1
        self.tower = FractionalTower(context, stated, _TOWER, final_norm=True)
        sizes = (self.tower.positions.size, self.hidden_size())
        number = settings.integer("query_num", 64)
        self.resampler = Resampler(context, _RESAMPLER, sizes, number)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, 3 * patch * patch] of an image's slices, of videos
                ``pixel_values_videos`` of the frames, and ``tgt_sizes`` [slices, 2]: rows and columns of
                their patches.
        """
        sizes = [[(rows, columns) for rows, columns in own["tgt_sizes"].tolist()] for own in inputs]
        grids = [grid for own in sizes for grid in own]
        states = self.tower.packed(torch.cat([own[_PIXELS[modality]] for own in inputs]), grids)
        vectors = self.resampler(states, grids)
        return torch.split(vectors, [len(own) * self.resampler.number for own in sizes])
