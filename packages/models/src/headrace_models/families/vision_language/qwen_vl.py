"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size, whose tokens stand in time,
height and width.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923; Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_core.multimodal import MediaInput
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.deepstack import DeepstackDecoder, interleaved_rope
from headrace_models.layers.vision.grid_decoder import (
    GRID,
    SECONDS,
    THETA,
    GridDecoder,
    TimedDecoder,
    embed_grids,
    grid_of,
)
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.towers.qwen3_vl import Qwen3VLTower
from headrace_models.layers.vision.towers.qwen3_vl import tower_rules as qwen3_tower_rules
from headrace_models.layers.vision.towers.qwen_vl import Grid, QwenVLTower, tower_rules
from headrace_models.layers.vision.video_pruning import RETAINED, UNPRUNED, pruned

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "visual"


class Qwen2VL(GridDecoder):
    """Four patches of an image, or of two frames of a video, are a vector."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")
    second: ClassVar[bool] = False
    """The tower is Qwen2.5-VL's."""

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        self.rope = rope_settings(self.settings.config, theta=THETA, partial=1.0)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower: QwenVLTower | Qwen3VLTower = QwenVLTower(
            context, vision, _TOWER, self.hidden_size(), second=type(self).second
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        made = embed_grids(self.tower, modality, inputs)
        return [
            self._pruned(vectors, item) if RETAINED in item else vectors
            for vectors, item in zip(made, inputs, strict=True)
        ]

    def _pruned(self, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        """See :func:`headrace_models.layers.vision.video_pruning.pruned`."""
        tokens = item.get(UNPRUNED, vectors.new_zeros(0).long())
        text = self.token_vectors(tokens[tokens >= 0])
        return pruned(vectors, grid_of(item[GRID["video"]])[0], item, text)


class Qwen2_5VL(TimedDecoder, Qwen2VL):
    """The tower has windows, RMS norms and gated layers; frames of a video stand apart by seconds."""

    second: ClassVar[bool] = True

    def place_media(self, whole: Mapping[str, Any]) -> None:
        super().place_media(whole)
        vision = Settings(part_of(whole, "vision_config"))
        self.places_per_second = vision.positive("tokens_per_second", 4)

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """See :meth:`headrace_models.layers.vision.grid_decoder.GridDecoder.box`."""
        box = super().box(sizes, item)
        if item.modality == "video":
            (seconds,) = item.inputs[SECONDS].tolist()
            interval = self.places_per_second * torch.tensor(seconds, dtype=torch.float32)
            box[0] = (box[0] * interval).long()
        return box


class Qwen3VL(DeepstackDecoder, Qwen2VL):
    """The tower gives vectors to the decoder's first layers, too."""

    media_rules: ClassVar[Sequence[WeightRule]] = qwen3_tower_rules(_TOWER, "tower")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = Qwen3VLTower(context, vision, _TOWER, self.hidden_size())

    def place_media(self, whole: Mapping[str, Any]) -> None:
        super().place_media(whole)
        self.rope = interleaved_rope(self.settings.config)
