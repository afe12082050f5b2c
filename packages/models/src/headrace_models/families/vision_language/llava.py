"""LLaVA 1.5: CLIP's or SigLIP's patches through a small MLP, in front of any decoder.

Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.vision.media_decoder import MediaDecoder
from headrace_models.layers.vision.projected import (
    TOWER_NAMES,
    ProjectedTower,
    projected_rules,
    unread_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class Llava(MediaDecoder):
    """An image is a vector for each of its patches."""

    media_rules: ClassVar[Sequence[WeightRule]] = projected_rules("vision")
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.vision = ProjectedTower(context, whole, self.hidden_size())

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.vision.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each.
        """
        return list(self.vision(torch.stack([item["pixel_values"] for item in inputs])))
