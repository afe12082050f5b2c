"""LFM2-VL: SigLIP 2's patches of images of their own shape, four of them a vector, in front of LFM2.

Liquid AI 2025, arXiv:2511.23404.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.projected import PROJECTOR, TOWER, TOWER_NAMES, unread_weights
from headrace_models.layers.vision.shuffle import joined_grid
from headrace_models.layers.vision.towers.clip import tower_rules
from headrace_models.layers.vision.towers.naflex import NaflexTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-5


class Lfm2Vl(MediaDecoder):
    """An image is one grid of patches or several tiles; each becomes a vector for every square of patches."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(TOWER, "tower"),
        WeightRule(f"{PROJECTOR}.layer_norm", "projector_norm"),
        WeightRule(f"{PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{PROJECTOR}.linear_2", "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        settings.refuse("vision_feature_layer", -1)
        self.tower = NaflexTower(context, part_of(whole, "vision_config"), TOWER)
        self.merge = settings.integer("downsample_factor", 2)
        unit = self.tower.positions.size * self.merge**2
        self.projector_norm: LayerNorm | None = None
        if settings.flag("projector_use_layernorm", True):
            self.projector_norm = LayerNorm(context, f"{PROJECTOR}.layer_norm", unit, _EPS)
        self.projector = Projector(
            context,
            f"{PROJECTOR}.linear_1",
            f"{PROJECTOR}.linear_2",
            (unit, settings.integer("projector_hidden_size", 2560), self.hidden_size()),
            settings.activation("projector_hidden_act", default="gelu"),
            bias=settings.flag("projector_bias", True),
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] of an image's tiles, and ``spatial_shapes``
                [tiles, 2]: rows and columns of their patches, in multiples of ``downsample_factor``.
        """
        shapes = [
            [(rows, columns) for rows, columns in x["spatial_shapes"].tolist()] for x in inputs
        ]
        grids = [grid for own in shapes for grid in own]
        states = self.tower.packed(torch.cat([x["pixel_values"] for x in inputs]), grids)
        tiles = torch.split(states, [rows * columns for rows, columns in grids])
        units = torch.cat(
            [joined_grid(own, *grid, self.merge) for own, grid in zip(tiles, grids, strict=True)]
        )
        if self.projector_norm is not None:
            units = self.projector_norm(units)
        counts = [sum(rows * columns for rows, columns in own) for own in shapes]
        return torch.split(self.projector(units), [count // self.merge**2 for count in counts])
