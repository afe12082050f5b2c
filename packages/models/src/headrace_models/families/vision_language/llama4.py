"""Llama 4 with images: tiles whose squares of patches become vectors, in the decoder's size by one product.

Meta 2025, "The Llama 4 herd".
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
from headrace_models.layers.vision.towers.llama4 import Llama4Tower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_model", "multi_modal_projector"


class Llama4(MediaDecoder):
    """A square of a tile's patches is a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projection"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = Llama4Tower(context, vision, _TOWER)
        size = self.tower.size
        stated = Settings(vision).integer("vision_output_dim", size)
        if stated != size:
            raise UnsupportedModel(
                f"config.json: vision_config.vision_output_dim = {stated}: must be projector_output_dim = "
                f"{size}"
            )
        name = f"{_PROJECTOR}.linear_1"
        self.projection = Linear(context, name, size, [Part(self.hidden_size())])

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [tiles, 3, height, width] each.
        """
        tiles = [item["pixel_values"] for item in inputs]
        states = self.tower(torch.cat(tiles))
        vectors = self.projection(states.flatten(0, 1))
        return torch.split(vectors, [len(own) * states.shape[1] for own in tiles])
