"""dots.ocr: a tower for pages of any size in front of Qwen 2's decoder, whose tokens stand one behind the
other.

rednote-hilab 2025, https://github.com/rednote-hilab/dots.ocr.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.native_size.dots import DotsTower, tower_rules
from headrace_models.layers.vision.grid_decoder import embed_grids
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vision_tower"


class DotsOCR(MediaDecoder):
    """Four patches of an image are a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = DotsTower(context, vision, _TOWER, self.hidden_size())

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)
