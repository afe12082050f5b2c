"""Bagel, as far as it understands images: SigLIP's patches of images of their own shape, a vector each; an
image's tokens all see each other, and stand at one place.

Deng et al. 2025, arXiv:2505.14683. It also draws, which is not served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.grid_decoder import GridDecoder
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.sees_ahead import SeesAhead
from headrace_models.layers.vision.towers.clip import Vector, tower_rules
from headrace_models.layers.vision.towers.naflex import NaflexTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput

_TOWER, _CONNECTOR, _PLACES = "vit_model.vision_model", "connector", "vit_pos_embed.pos_embed"
_SIDE = 70
"""Places of a row and of a column, where configs leave it out."""
_IMAGE_SIZE, _PATCH, _LAYERS = 980, 14, 27


class Bagel(SeesAhead, GridDecoder):
    """An image is its patches' vectors between two tokens, that see them and are seen by them."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_CONNECTOR}.fc1", "connector.up"),
        WeightRule(f"{_CONNECTOR}.fc2", "connector.down"),
        WeightRule(_PLACES, "places.vector"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        settings.refuse("visual_und", True)
        settings.refuse("interpolate_pos", False)
        side = settings.integer("vit_max_num_patch_per_side", _SIDE)
        self.tower = _tower(context, Settings(part_of(whole, "vit_config")), side)
        size = self.hidden_size()
        activation = settings.activation("connector_act", "gelu_pytorch_tanh")
        sizes = self.tower.positions.size, size, size
        names = f"{_CONNECTOR}.fc1", f"{_CONNECTOR}.fc2"
        self.connector = Projector(context, *names, sizes, activation)
        self.places = Vector(_PLACES, side**2, size)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] each, row by row; ``image_grid`` [2]: its
                rows and columns.
        """
        grids = [(int(rows), int(columns)) for rows, columns in (x["image_grid"] for x in inputs)]
        states = self.tower.packed(torch.cat([x["pixel_values"] for x in inputs]), grids)
        places = torch.cat([corner(self.places.vector, *grid) for grid in grids])
        vectors = self.connector(states) + places
        return torch.split(vectors, [rows * columns for rows, columns in grids])

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: an image, with the tokens around it, is one step;
        the axes are alike."""
        steps = torch.ones(num_tokens, dtype=torch.int64)
        for item in media:
            for first, number in item.vector_runs:
                begin = item.offset + first
                steps[begin : begin + number + 1] = 0
        return (steps.cumsum(0) - 1).expand(3, num_tokens)

    def rotary_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """See :meth:`GridDecoder.rotary_rows`."""
        return table[places[0].to(table.device)]


class _Tower(NaflexTower):
    """Places count from an image's corner: the table is not resized."""

    def placed_in(self, height: int, width: int) -> Tensor:
        """[height * width, H]."""
        return corner(self.positions.weight, height, width)


def corner(table: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of a square table [places, H], as [rows * columns, H]."""
    side = round(len(table) ** 0.5)
    return table.view(side, side, -1)[:rows, :columns].flatten(0, 1)


def _tower(context: BuildContext, stated: Settings, side: int) -> _Tower:
    """All but the last block, and the last norm, as the published code cuts it.

    Raises: UnsupportedModel: the tower's places are others than the decoder's.
    """
    stated.refuse("rope", False)
    size, patch = stated.integer("image_size", _IMAGE_SIZE), stated.integer("patch_size", _PATCH)
    if size // patch != side:
        raise UnsupportedModel(
            f"config.json: vit_max_num_patch_per_side = {side}: vit_config has {size // patch} places a side"
        )
    layers = stated.integer("num_hidden_layers", _LAYERS) - 1
    own = {"patch_size": patch, "num_patches": side**2, "num_hidden_layers": layers}
    return _Tower(context, {**stated.config, **own}, _TOWER)
