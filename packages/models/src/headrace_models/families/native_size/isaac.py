"""Isaac: SigLIP 2's patches of images of their own shape, a square of them a vector, in front of Qwen 3.

Perceptron 2025, Isaac 0.1 and 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.grid_decoder import GRID, GridDecoder, grid_of
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.shuffle import joined_grid
from headrace_models.layers.vision.towers.clip import tower_rules
from headrace_models.layers.vision.towers.naflex import NaflexTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput

_WHOLE = "vision_embedding"
_TOWER, _UP, _DOWN = (f"{_WHOLE}.{index}" for index in (0, 1, 3))
_WIDENED = 4


class Isaac(GridDecoder):
    """Isaac 0.1 and 0.2."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(_UP, "projector.up"),
        WeightRule(_DOWN, "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        (f"{_WHOLE}.vision_tower.", f"{_TOWER}."),
        (f"{_WHOLE}.multimodal_projector.0.", f"{_UP}."),
        (f"{_WHOLE}.multimodal_projector.2.", f"{_DOWN}."),
    )

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("pixel_shuffle_scale_factor", 1)
        rope = rope_settings(self.settings.config)
        # The published code takes these shares, one after the other, whatever the config says of turns.
        half = self.head_dim() // 2  # type: ignore[attr-defined]
        quarter = half // 4
        sections = rope.sections or (half - 2 * quarter, quarter, quarter)
        self.rope = replace(rope, sections=sections, interleaved_sections=False)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = NaflexTower(context, part_of(whole, "vision_config"), _TOWER)
        unit = self.tower.positions.size * self.merge**2
        sizes = unit, _WIDENED * unit, self.hidden_size()
        self.projector = Projector(context, _UP, _DOWN, sizes, "silu", bias=False)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] each, row by row; ``image_grid_thw`` [3]: 1,
                its rows and columns.
        """
        grids = [grid_of(own[GRID["image"]])[1:] for own in inputs]
        states = self.tower.packed(torch.cat([own["pixel_values"] for own in inputs]), grids)
        images = torch.split(states, [rows * columns for rows, columns in grids])
        units = [joined_grid(x, *grid, self.merge) for x, grid in zip(images, grids, strict=True)]
        vectors = self.projector(torch.cat(units))
        return torch.split(vectors, [len(unit) for unit in units])

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: an image is one step in time, its rows and columns
        count from 0, and text goes on with the next step."""
        found, place, done = [], 0, 0
        for item in media:
            text = item.offset - done
            _, rows, columns = self._box_sizes(item, 1)
            box = self.box((1, rows, columns), item)
            box[0] += place + text
            found += [torch.arange(place, place + text).expand(3, text), box]
            place, done = place + text + 1, item.offset + rows * columns
        rest = num_tokens - done
        found.append(torch.arange(place, place + rest).expand(3, rest))
        return torch.cat(found, dim=1)
