"""PaliGemma: SigLIP's patches through a projection in front of Gemma 1 or 2; all of a prompt sees all of it.

Beyer et al. 2024, arXiv:2407.07726; Steiner et al. 2024, arXiv:2412.03555.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.projected import TOWER, TOWER_NAMES, unread_weights
from headrace_models.layers.vision.sees_ahead import SeesAhead
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from headrace_core.model import BuildContext

_PROJECTION = "multi_modal_projector.linear"


class PaliGemma(SeesAhead):
    """An image is a vector for each of its patches."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(TOWER, "tower"),
        WeightRule(_PROJECTION, "projection"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = ClipTower(context, part_of(whole, "vision_config"), TOWER, final_norm=True)
        size, parts = self.tower.positions.size, [Part(self.hidden_size())]
        self.projection = Linear(context, _PROJECTION, size, parts, bias=True)

    def unread_weights(self) -> Mapping[str, str]:
        """The tower's head."""
        return unread_weights(self.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        count, number, _ = states.shape
        return list(self.projection(states.flatten(0, 1)).view(count, number, -1))
