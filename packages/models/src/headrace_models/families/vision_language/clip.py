"""CLIP: texts and images as vectors of one space.

Radford et al. 2021, arXiv:2103.00020. ``families/encoder/clip.py`` has the text encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.shared_space import SharedSpace
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTION = "vision_model", "visual_projection"


class Clip(SharedSpace):
    """An image is the state of the tower's own vector, projected."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(_PROJECTION, "media_projection"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        assert context.pooling is not None
        self.tower = ClipTower(context, part_of(whole, "vision_config"), _TOWER, final_norm=True)
        sizes = self.tower.positions.size, [Part(context.pooling.embedding_size)]
        self.media_projection = Linear(context, _PROJECTION, *sizes)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        return torch.split(self.media_projection(states[:, 0].contiguous()), 1)
