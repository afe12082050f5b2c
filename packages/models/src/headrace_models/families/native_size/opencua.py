"""OpenCUA: Qwen2.5-VL's tower in front of Qwen 2's decoder, whose tokens stand one behind the other.

Wang et al. 2025, arXiv:2508.09123.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.vision.grid_decoder import embed_grids
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.towers.qwen_vl import QwenVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vision_tower"


class OpenCUA(MediaDecoder):
    """Four patches of an image are a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = QwenVLTower(context, vision, _TOWER, self.hidden_size(), second=True)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)
