"""The thinker of an omni model: a decoder with towers for seeing and hearing, whose items share one clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_models.config.settings import Settings
from headrace_models.layers.towers import TowersByModality
from headrace_models.layers.vision.grid_decoder import SECONDS, TimedDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput
    from headrace_models.layers.vision.towers.qwen_vl import Grid

_PLACES_PER_SECOND = 25
"""Value that configs may leave out."""


class Thinker(TowersByModality, TimedDecoder):
    """A second is as many places for frames of a video as for audio. What makes speech of the thinker's
    text is not read."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        """See :meth:`TowersByModality.make_towers`."""
        thinker = whole.get("thinker_config", whole)
        super().make_towers(context, thinker)
        self.places_per_second = Settings(thinker).positive(
            "position_id_per_seconds", _PLACES_PER_SECOND
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors that no text comes from, too."""
        return {**super().unread_weights(), r"(talker|token2wav|code2wav)\..*": "makes speech"}

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """See :meth:`headrace_models.layers.vision.grid_decoder.GridDecoder.box`."""
        box = super().box(sizes, item)
        if item.modality == "video":
            (seconds,) = item.inputs[SECONDS].tolist()
            box[0] = (box[0] * torch.tensor(seconds) * self.places_per_second).long()
        return box
