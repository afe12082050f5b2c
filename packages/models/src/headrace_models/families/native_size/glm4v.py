"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: images and videos of any size, whose tokens stand in time, height
and width; the times of a video's frames stand in the text.

GLM-V Team 2025, arXiv:2507.01006.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.native_size.glm4v import Glm4vTower, tower_rules
from headrace_models.layers.vision.grid_decoder import GridDecoder, embed_grids
from headrace_models.layers.vision.media_decoder import part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "visual"
_THETA, _PARTIAL = 10_000.0, 0.5
_SECTIONS = (8, 12, 12)
"""Values that configs may leave out."""


class Glm4v(GridDecoder):
    """Four patches of an image, or of two frames of a video, are a vector."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")
    ocr: ClassVar[bool] = False
    """The tower is GLM-OCR's."""

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        rope = rope_settings(self.settings.config, theta=_THETA, partial=_PARTIAL)
        self.rope = replace(rope, sections=rope.sections or _SECTIONS)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision, size = part_of(whole, "vision_config"), self.hidden_size()
        self.tower = Glm4vTower(context, vision, _TOWER, size, ocr=type(self).ocr)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)


class GlmOcr(Glm4v):
    """Images only; the tower has norms of heads, and no learned positions."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    ocr: ClassVar[bool] = True

    def unread_weights(self) -> Mapping[str, str]:
        """A head that the files have behind the last layer."""
        return {r"language_model\.layers\.16\..*": "a head that predicts several tokens"}
