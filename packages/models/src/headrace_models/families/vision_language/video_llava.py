"""Video-LLaVA: a tower for images and one for the frames of videos, of one shape, and one MLP behind both.

Lin et al. 2023, arXiv:2311.10122.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.projected import (
    ProjectedTower,
    feature_layer,
    projected_rules,
    unread_weights,
)
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_IMAGES, _VIDEOS = "image_tower", "video_tower"
_LAYER = -2
"""The layer that is read, where configs leave it out."""


class VideoLlava(MediaDecoder):
    """An image is a vector for each of its patches; a frame has the tower's own vector in front."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *projected_rules("vision", _IMAGES),
        *tower_rules(_VIDEOS, "frames"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = tuple(
        (f"{tower}.vision_model.", f"{tower}.") for tower in (_IMAGES, _VIDEOS)
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.vision = ProjectedTower(context, whole, self.hidden_size(), layer=_LAYER, name=_IMAGES)
        vision, layer = part_of(whole, "vision_config"), feature_layer(whole, _LAYER)
        self.frames = ClipTower(context, vision, _VIDEOS, last=layer)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the towers behind the states that are taken."""
        return {
            **unread_weights(self.vision.tower, _IMAGES),
            **unread_weights(self.frames, _VIDEOS),
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each; of videos ``pixel_values_videos`` [frames, 3,
                height, width].
        """
        if modality != "video":
            return list(self.vision(torch.stack([item["pixel_values"] for item in inputs])))
        videos = [item["pixel_values_videos"] for item in inputs]
        states = self.frames(torch.cat(videos))
        vectors = self.vision.projector(states.flatten(0, 1))
        return torch.split(vectors, [len(frames) * states.shape[1] for frames in videos])
