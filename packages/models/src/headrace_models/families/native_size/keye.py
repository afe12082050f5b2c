"""Keye-VL and Keye-VL 1.5: a tower for images of any size and a projector in front of Qwen 3's decoder, whose
tokens of images stand in height and width.

Kwai Keye Team 2025, arXiv:2507.01949, arXiv:2509.01563.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.native_size.keye import KeyeTower, tower_rules
from headrace_models.layers.native_size.square_projector import SquareProjector, projector_rules
from headrace_models.layers.vision.grid_decoder import (
    GRID,
    PIXELS,
    SECONDS,
    THETA,
    GridDecoder,
    TimedDecoder,
    grid_of,
)
from headrace_models.layers.vision.media_decoder import part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput
    from headrace_models.layers.vision.towers.qwen_vl import Grid

_TOWER, _PROJECTOR = "visual.vision_model", "mlp_AR"
_SECTIONS = (16, 24, 24)
"""Value that configs may leave out."""


class KeyeImages(GridDecoder):
    """Four patches of an image are a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *projector_rules(_PROJECTOR, "projector"),
    )
    joined: ClassVar[bool] = False
    """The projector's norm is of four patches together."""
    joins_frames: ClassVar[bool] = False
    """See :class:`~headrace_models.layers.native_size.grid_tower.GridTower`."""

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        rope = rope_settings(self.settings.config, theta=THETA)
        self.rope = replace(rope, sections=rope.sections or _SECTIONS)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        joins = type(self).joins_frames
        self.tower = KeyeTower(context, part_of(whole, "vision_config"), _TOWER, joins_frames=joins)
        size = self.tower.size
        sizes = size, size * self.merge**2, self.hidden_size()
        self.projector = SquareProjector(context, _PROJECTOR, sizes, joined=type(self).joined)

    def unread_weights(self) -> Mapping[str, str]:
        """The tower's head, and positions of images that are not stretched."""
        return {
            r"visual\.vision_model\.head\..*": "the head of SigLIP",
            r"visual\.vision_model\.embeddings\.packing_position_embedding\..*": "positions by number",
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, channels * patch * patch], square by square, and
                ``image_grid_thw`` [3] each; of videos ``pixel_values_videos`` and ``video_grid_thw``.
        """
        grids = [grid_of(item[GRID[modality]]) for item in inputs]
        states = self.tower([item[PIXELS[modality]] for item in inputs], grids)
        return self.tower.split(self.projector(states), grids)


class Keye(TimedDecoder, KeyeImages):
    """Keye-VL. All of a video's frames see each other in the tower, and stand apart by seconds in the
    prompt."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    joins_frames: ClassVar[bool] = True

    def place_media(self, whole: Mapping[str, Any]) -> None:
        super().place_media(whole)
        vision = Settings(part_of(whole, "vision_config"))
        self.places_per_second = vision.positive("tokens_per_second", 2)

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """See :meth:`headrace_models.layers.vision.grid_decoder.GridDecoder.box`."""
        box = super().box(sizes, item)
        if item.modality == "video":
            (seconds,) = item.inputs[SECONDS].tolist()
            box[0] = (box[0] * torch.tensor(seconds) * self.places_per_second).long()
        return box


class KeyeVL1_5(KeyeImages):
    """Keye-VL 1.5. A video's frames are as images."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    joined: ClassVar[bool] = True
