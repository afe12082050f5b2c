"""HyperCLOVA X Seed Vision 3B: tiles through SigLIP, whose states stages of RegNet make fewer, in front of a
Llama decoder.

NAVER 2025, "HyperCLOVAX-SEED-Vision-Instruct-3B"; Cha et al. 2023, arXiv:2312.06742, for the projector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.convolutional.reg_stage import RegStage, stage_rules
from headrace_models.layers.vision.anyres import (
    Size,
    best_canvas,
    canvases,
    cut_off,
    one_plane,
    unpadded,
    with_row_ends,
)
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.projected import unread_weights
from headrace_models.layers.vision.towers.clip import ClipTower, Vector, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR, _NEWLINE = "vision_model", "mm_projector", "image_newline"
_DEPTH = 3
"""Blocks of a stage."""


class CAbstractor(Layer):
    """States of tiles -> fewer vectors, each of a part of the tile.

    Args:
        states: in a row of a tile, and the size of one.
        out: vectors in a row, and the size of one.
    """

    def __init__(
        self, context: BuildContext, name: str, states: tuple[int, int], out: tuple[int, int]
    ) -> None:
        (self.before, size), (self.after, out_size) = states, out
        self.positions = Vector(f"{name}.pos_emb", 1, self.before**2, size)
        self.first = RegStage(f"{name}.net.0", _DEPTH, size, size)
        self.second = RegStage(f"{name}.net.2", _DEPTH, size, size)
        readout = f"{name}.readout"
        self.readout = Projector(
            context, f"{readout}.0", f"{readout}.2", (size, out_size, out_size), "silu"
        )

    def __call__(self, states: Tensor) -> Tensor:
        """states [tiles, before ** 2, size] -> [tiles, after ** 2, out_size]."""
        placed = (states + self.positions.vector).transpose(1, 2)
        x = self.first(placed.reshape(*placed.shape[:2], self.before, self.before))
        x = self.second(functional.adaptive_avg_pool2d(x, (self.after, self.after)))
        flat = x.flatten(2).transpose(1, 2)
        return self.readout(flat.flatten(0, 1).contiguous()).view(*flat.shape[:2], -1)


class HCXVision(MediaDecoder):
    """An image is a small picture of the whole, then rows of vectors of its tiles, margins left out."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.pos_emb", "abstractor.positions.vector"),
        *stage_rules(f"{_PROJECTOR}.net.0", "abstractor.first", _DEPTH),
        *stage_rules(f"{_PROJECTOR}.net.2", "abstractor.second", _DEPTH),
        WeightRule(f"{_PROJECTOR}.readout.0", "abstractor.readout.up"),
        WeightRule(f"{_PROJECTOR}.readout.2", "abstractor.readout.down"),
        WeightRule(_NEWLINE, "newline.vector"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = ((f"{_TOWER}.vision_model.", f"{_TOWER}."),)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        for key, only in (
            ("mm_projector_type", "cabstractor"), ("anyres", True), ("unpad", True), ("proj_pos_emb", True),
            ("proj_prenorm", False),
        ):  # fmt: skip
            settings.refuse(key, only)
        layer = whole.get("use_nth_layer", -1)
        if type(layer) is not int:
            raise UnsupportedModel(f"config.json: use_nth_layer = {layer!r}: must be one layer")
        hidden, vision = self.hidden_size(), part_of(whole, "vision_config")
        self.tower = ClipTower(context, vision, _TOWER, last=layer)
        queries = settings.integer("num_queries_vis_abstractor_image", maximum=1 << 16)
        self.side = math.isqrt(queries)
        if self.side**2 != queries:
            raise UnsupportedModel(
                f"config.json: num_queries_vis_abstractor_image = {queries}: must be a square number"
            )
        states = self.tower.side, self.tower.positions.size
        self.abstractor = CAbstractor(context, _PROJECTOR, states, (self.side, hidden))
        self.newline = Vector(_NEWLINE, hidden)
        self.tile = self.tower.image_size
        stated = {"image_grid_pinpoints": whole.get("possible_resolutions") or None}
        self.sizes = canvases(stated, _canvases(settings, self.tile), self.tile)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.tower, _TOWER)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [1 + tiles, 3, height, width] and ``image_sizes`` [2] each, height and
                width of the image.
        """
        return [self._rows(item["pixel_values"], item["image_sizes"].tolist()) for item in inputs]

    def _rows(self, tiles: Tensor, image: Sequence[int]) -> Tensor:
        states = self.tower(tiles)[:, int(self.tower.is_clip) :]
        vectors = self.abstractor(states)
        size = image[0], image[1]
        height, width = best_canvas(size, self.sizes)
        plane = one_plane(vectors[1:], height // self.tile, width // self.tile, self.side)
        kept = unpadded(plane, size, cut_off)
        return torch.cat((vectors[0], with_row_ends(kept, self.newline.vector)))


def _canvases(settings: Settings, tile: int) -> Sequence[Size]:
    """Of up to ``max_num_grids`` tiles, where a config lists none."""
    most = settings.integer("max_num_grids", 9, maximum=64)
    alone = settings.flag("use_1x1_grid", False)
    return [
        (rows * tile, columns * tile)
        for rows in range(1, most + 1)
        for columns in range(1, most + 1)
        if rows * columns <= most and (alone or rows * columns > 1)
    ]
