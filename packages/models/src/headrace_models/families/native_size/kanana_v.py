"""Kanana-V: Qwen2-VL's tower without its merger, stages of RegNet that make a vector of four neighbours, in
front of a Llama decoder.

Kakao 2025, "Kanana-1.5-v-3b-instruct"; Cha et al. 2023, arXiv:2312.06742, for the projector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.convolutional.reg_stage import RegStage, stage_rules
from headrace_models.layers.vision.grid_decoder import embed_grids
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.clip import Vector
from headrace_models.layers.vision.towers.qwen_vl import Grid, QwenVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_model", "abstractor"
_DEFAULTS: Mapping[str, Any] = {
    "depth": 2, "encoder_hidden_size": 1280, "hidden_size": 1024, "merge_size": 2,
    "output_hidden_size": 2048, "pos_emb_size": 576,
}  # fmt: skip
"""Values that configs may leave out."""
_MOST_BLOCKS = 16
"""Of a stage."""


class Abstractor(Layer):
    """States of an image [H * W] -> a vector for every square of them.

    The published model lays states out in rows of the image's width though they come square by square, as
    the tower has them; it was trained so.

    Args:
        settings: the projector's part of the config.
        name: as the checkpoint spells it.
        states: size of a state.
        out_size: of a vector.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, states: int, out_size: int
    ) -> None:
        self.merge = settings.integer("merge_size", maximum=64)
        places = settings.integer("pos_emb_size", maximum=1 << 20)
        self.side = int(places**0.5)
        _check(settings, states, out_size)
        if self.side**2 != places:
            raise UnsupportedModel(
                f"config.json: projector_config.pos_emb_size = {places}: must be a square number"
            )
        inner = settings.integer("hidden_size")
        depth = settings.integer("depth", maximum=_MOST_BLOCKS)
        self.positions = Vector(f"{name}.pos_emb", 1, places, states)
        self.first = RegStage(f"{name}.net.0", depth, states, inner)
        self.second = RegStage(f"{name}.net.2", depth, self.merge**2 * inner, inner)
        readout = f"{name}.readout"
        self.readout = Projector(
            context, f"{readout}.0", f"{readout}.2", (inner, out_size, out_size), "silu"
        )

    def __call__(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """states [rows * columns, size] -> [rows * columns / merge ** 2, out_size]."""
        plane = (states + self._placed(rows, columns)).T.reshape(1, -1, rows, columns)
        x = functional.pixel_unshuffle(self.first(plane), self.merge)
        return self.readout(self.second(x)[0].flatten(1).T.contiguous())

    def _placed(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, size]: positions, resampled."""
        table = self.positions.vector
        if rows == columns == self.side:
            return table[0]
        plane = table.float().view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        made = functional.interpolate(plane, (rows, columns), mode="bicubic", antialias=True)
        return made[0].flatten(1).T.to(table.dtype)


def _check(settings: Settings, states: int, out_size: int) -> None:
    """Raises: UnsupportedModel: the config asks for what is not built, or sizes do not fit."""
    for key, accepted in (
        ("projector_type", "dynamic-c-abs"), ("pos_emb", True), ("prenorm", False), ("num_eos_tokens", 0),
        ("mlp_depth", 2), ("feature_layer_index", -1), ("encoder_hidden_size", states),
        ("output_hidden_size", out_size),
    ):  # fmt: skip
        settings.refuse(key, accepted)


class KananaV(MediaDecoder):
    """Four neighbouring patches of an image are a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.pos_emb", "abstractor.positions.vector"),
        *stage_rules(f"{_PROJECTOR}.net.0", "abstractor.first", _MOST_BLOCKS),
        *stage_rules(f"{_PROJECTOR}.net.2", "abstractor.second", _MOST_BLOCKS),
        WeightRule(f"{_PROJECTOR}.readout.0", "abstractor.readout.up"),
        WeightRule(f"{_PROJECTOR}.readout.2", "abstractor.readout.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = QwenVLTower(context, vision, _TOWER, 0, second=False, merges=False)
        settings = Settings({**_DEFAULTS, **part_of(whole, "projector_config")})
        self.abstractor = Abstractor(
            context, settings, _PROJECTOR, self.tower.state_size, self.hidden_size()
        )
        if self.tower.merge != self.abstractor.merge:
            raise UnsupportedModel(
                f"config.json: projector_config.merge_size = {self.abstractor.merge}: must be "
                f"vision_config.spatial_merge_size = {self.tower.merge}"
            )

    def vectors(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Of images of any sizes; arguments as :class:`QwenVLTower`'s."""
        states = self.tower(patches, grids)
        return [
            self.abstractor(own, rows, columns)
            for own, (_, rows, columns) in zip(states, grids, strict=True)
        ]

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.vectors, modality, inputs)
