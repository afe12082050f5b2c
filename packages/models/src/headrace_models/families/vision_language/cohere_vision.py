"""Aya Vision and Command A Vision: tiles of an image through SigLIP's tower, of whose patches four become a
vector, through a gated layer.

Dash et al. 2025, arXiv:2505.08751; Cohere 2025, "Command A Vision".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.linear import column_parallel, row_parallel
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.projected import (
    PROJECTOR,
    TOWER,
    TOWER_NAMES,
    feature_layer,
    unread_weights,
)
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GatedProjector(Layer):
    """``down(silu(gate(x)) * up(x))``, after a norm if it has one.

    Args:
        sizes: of what comes, of gate and up together, and of the result.
        eps: of the norm; None: there is none.
    """

    def __init__(
        self, context: BuildContext, sizes: tuple[int, int, int], *, eps: float | None
    ) -> None:
        before, both, after = sizes
        if both % 2:
            raise UnsupportedModel(
                f"config.json: alignment_intermediate_size = {both}: must be an even number"
            )
        half = both // 2
        self.norm = (
            None if eps is None else LayerNorm(context, f"{PROJECTOR}.layernorm", before, eps)
        )
        self.gate_up = column_parallel(
            context, f"{PROJECTOR}.linear_1", before, (half, half), bias=True
        )
        self.down = row_parallel(context, f"{PROJECTOR}.linear_2", half, after, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, sizes[0]] -> [T, sizes[2]]."""
        x = x if self.norm is None else self.norm(x)
        return self.down(self.gate_up.gated(x, "silu"))


class Cohere2Vision(MediaDecoder):
    """A tile is a run of vectors."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(TOWER, "tower"),
        WeightRule(f"{PROJECTOR}.layernorm", "projector.norm"),
        WeightRule(f"{PROJECTOR}.linear_1", "projector.gate_up", split=(), order=(1, 0)),
        WeightRule(f"{PROJECTOR}.linear_2", "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        self.tower = self.make_tower(context, whole, part_of(whole, "vision_config"))
        self.factor = settings.integer("downsample_factor", 2)
        if self.tower.side % self.factor:
            raise UnsupportedModel(
                f"config.json: downsample_factor = {self.factor}: must divide the {self.tower.side} patches "
                "of a side of a tile"
            )
        sizes = (
            self.tower.positions.size * self.factor**2,
            settings.integer("alignment_intermediate_size", self.projector_width()),
            self.hidden_size(),
        )
        self.projector = GatedProjector(context, sizes, eps=self.projector_eps(settings))

    def make_tower(
        self, context: BuildContext, whole: Mapping[str, Any], vision: Mapping[str, Any]
    ) -> ClipTower:
        """The tower, which ends where its states are read."""
        return ClipTower(context, vision, TOWER, final_norm=True)

    def projector_width(self) -> int:
        """``alignment_intermediate_size`` of configs without it."""
        return 36864

    def projector_eps(self, settings: Settings) -> float | None:
        """See :class:`GatedProjector`."""
        return None

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [tiles, 3, side, side] each.
        """
        pixels = [item["pixel_values"] for item in inputs]
        vectors = joined(self.tower(torch.cat(pixels)), self.tower.side, self.factor)
        projected = self.projector(vectors.flatten(0, 1))
        return torch.split(projected, [len(tiles) * vectors.shape[1] for tiles in pixels])


class AyaVision(Cohere2Vision):
    """Its states may come from any layer, without the tower's last norm; the projector has one."""

    def make_tower(
        self, context: BuildContext, whole: Mapping[str, Any], vision: Mapping[str, Any]
    ) -> ClipTower:
        Settings(whole).choice("vision_feature_select_strategy", ("full",), "full")
        return ClipTower(context, vision, TOWER, last=feature_layer(whole, -1))

    def projector_width(self) -> int:
        return self.hidden_size()

    def projector_eps(self, settings: Settings) -> float | None:
        return settings.positive("adapter_layer_norm_eps", 1e-6)
