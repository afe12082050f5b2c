"""Qwen3.5 with images and videos: Qwen3-VL's tower, whose vectors all stand in the stream, in front of a
decoder with delta nets; where attention turns, it does so by time, height and width.

Bai et al. 2025, arXiv:2511.21631 (the tower).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.grid_decoder import GridDecoder, embed_grids
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.towers.qwen3_vl import Qwen3VLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _LEVELS = "visual", "deepstack_visual_indexes"
_PARTIAL = 0.25
_SECTIONS = (11, 11, 10)
"""Values that configs may leave out."""


class Qwen3_5(GridDecoder):
    """Four patches of an image, or of two frames of a video, are a vector."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        rope = rope_settings(self.settings.config, partial=_PARTIAL)
        self.rope = replace(rope, sections=rope.sections or _SECTIONS, interleaved_sections=True)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        levels = vision.get(_LEVELS) or []
        if levels:
            raise UnsupportedModel(
                f"config.json: vision_config.{_LEVELS} = {levels!r}: must be empty; Qwen3.5's decoder takes "
                "the tower's last vectors only"
            )
        self.tower = Qwen3VLTower(context, {**vision, _LEVELS: []}, _TOWER, self.hidden_size())

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)
