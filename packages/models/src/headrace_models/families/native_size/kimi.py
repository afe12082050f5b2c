"""Kimi-VL and Kimi K2.5: MoonViT and a projector in front of DeepSeek V3's decoder; images of any size, whose
tokens stand one behind the other, and videos, of which a vector stands for four frames.

Kimi Team 2025, arXiv:2504.07491; Kimi Team 2026, arXiv:2602.02276.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.native_size.moonvit import MoonVit, tower_rules
from headrace_models.layers.native_size.square_projector import (
    EPS,
    PARTS,
    SquareProjector,
    projector_rules,
)
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vision_tower"
SIZES = "image_grid_hws"
"""Model input: [2] int64, rows and columns of an image's patches."""


class KimiVL(MediaDecoder):
    """Four patches of an image are a vector."""

    projector_name: ClassVar[str] = "multi_modal_projector"
    parts: ClassVar[tuple[str, str]] = PARTS
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *projector_rules("multi_modal_projector", "projector"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = MoonVit(context, part_of(whole, "vision_config"), _TOWER)
        size = self.tower.size
        sizes = size, size * self.tower.merge**2, self.hidden_size()
        self.projector = SquareProjector(
            context,
            self.projector_name,
            sizes,
            parts=self.parts,
            eps=self.norm_eps_of(whole),
        )

    def norm_eps_of(self, whole: Mapping[str, Any]) -> float:
        """Epsilon of the projector's norm."""
        return EPS

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, 3 * patch * patch] and ``image_grid_hws`` [2] each.
        """
        grids = [(1, rows, columns) for rows, columns in (own[SIZES].tolist() for own in inputs)]
        vectors = self.projector(self.tower([own["pixel_values"] for own in inputs], grids))
        return torch.split(vectors, [math.prod(grid) // self.tower.merge**2 for grid in grids])


class KimiK25(KimiVL):
    """The projector has other names. Four frames of a video see each other, and their mean is projected."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    projector_name: ClassVar[str] = "mm_projector"
    parts: ClassVar[tuple[str, str]] = ("proj.0", "proj.2")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *projector_rules("mm_projector", "projector", ("proj.0", "proj.2")),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        (f"{_TOWER}.encoder.patch_embed.", f"{_TOWER}.patch_embed."),
    )
    """As transformers writes it."""

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of images, see :meth:`KimiVL.embed_media`; of videos ``pixel_values_videos`` [patches, 3 *
                patch * patch] and ``video_grid_thw`` [stretches, 3] each: frames that see each other, rows
                and columns of a stretch.
        """
        if modality != "video":
            return super().embed_media(modality, inputs)
        clips = [[(t, r, c) for t, r, c in own["video_grid_thw"].tolist()] for own in inputs]
        grids = [grid for clip in clips for grid in clip]
        patches = torch.cat([own["pixel_values_videos"] for own in inputs])
        sizes = [math.prod(grid) for grid in grids]
        states = self.tower(torch.split(patches, sizes), grids)
        means = [
            stretch.view(grid[0], -1, self.tower.size).mean(dim=0)
            for stretch, grid in zip(torch.split(states, sizes), grids, strict=True)
        ]
        vectors = self.projector(torch.cat(means))
        counts = [sum(r * c for _, r, c in clip) // self.tower.merge**2 for clip in clips]
        return torch.split(vectors, counts)

    def norm_eps_of(self, whole: Mapping[str, Any]) -> float:
        vision = Settings(part_of(whole, "vision_config"))
        return vision.number(
            "projector_ln_eps", Settings(whole).number("projection_layer_norm_eps", EPS)
        )
