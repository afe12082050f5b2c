"""Mistral Small 3.1, Ministral 3 and LightOnOCR: Pixtral's tower, and a square of its patches is a vector.

Agrawal et al. 2024, arXiv:2410.07073 (tower).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.pixtral import PixtralTower, feature_layer, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def _rules(tower: str, projector: str) -> tuple[WeightRule, ...]:
    return (
        *tower_rules(tower, "tower"),
        WeightRule(f"{projector}.norm", "projector.norm"),
        WeightRule(f"{projector}.patch_merger.merging_layer", "projector.merger"),
        WeightRule(f"{projector}.linear_1", "projector.mlp.up"),
        WeightRule(f"{projector}.linear_2", "projector.mlp.down"),
    )


class MergingProjector(Layer):
    """Norm, one product that makes a vector of a square of patches, MLP.

    Args:
        name: as the checkpoint spells it.
        sizes: of the patches' states and of the vectors.
        merge: side of a square in patches.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: tuple[int, int],
        *,
        merge: int,
        eps: float,
        activation: str,
        bias: bool,
    ) -> None:
        inner, hidden = sizes
        self.merge = merge
        self.norm = RMSNorm(context, f"{name}.norm", inner, eps)
        self.merger = Linear(
            context, f"{name}.patch_merger.merging_layer", inner * merge**2, [Part(inner)]
        )
        self.mlp = Projector(
            context,
            f"{name}.linear_1",
            f"{name}.linear_2",
            (inner, hidden, hidden),
            activation,
            bias=bias,
        )

    def __call__(self, states: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> list[Tensor]:
        """States [rows * columns, inner] of images -> [squares, hidden] each; patches that fill no square
        are left out."""
        squares = [self._squares(own, *grid) for own, grid in zip(states, grids, strict=True)]
        vectors = self.mlp(self.merger(torch.cat(squares)))
        return list(torch.split(vectors, [len(own) for own in squares]))

    def _squares(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, inner] -> [squares, inner * merge ** 2]: the patches' first numbers, then their
        second ones ..."""
        merge = self.merge
        down, across = rows // merge, columns // merge
        grid = self.norm(states).view(rows, columns, -1)[: down * merge, : across * merge]
        squares = grid.reshape(down, merge, across, merge, -1).permute(0, 2, 4, 1, 3)
        return squares.reshape(down * across, -1)


class Mistral3(MediaDecoder):
    """A square of an image's patches is a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = _rules("vision_tower", "multi_modal_projector")
    names: ClassVar[tuple[str, str]] = ("vision_tower", "multi_modal_projector")
    """Of the tower and the projector, as checkpoints spell them."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings that count whatever the config says."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**whole, **self.fixed})
        tower, projector = self.names
        self.tower = PixtralTower(
            context,
            part_of(whole, "vision_config"),
            tower,
            last=feature_layer(settings.config, -1),
        )
        self.projector = MergingProjector(
            context,
            projector,
            (self.tower.size, self.hidden_size()),
            merge=settings.integer("spatial_merge_size", 2),
            eps=self.settings.number("rms_norm_eps", 1e-6),
            activation=settings.activation("projector_hidden_act", default="gelu"),
            bias=settings.flag("multimodal_projector_bias", False),
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return self.tower.unused

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each, of any sizes.
        """
        images = [item["pixel_values"] for item in inputs]
        return self.projector(self.tower(images), [self.tower.grid(image) for image in images])


class LightOnOCR(Mistral3):
    """The same under other names."""

    media_rules: ClassVar[Sequence[WeightRule]] = _rules("vision_encoder", "vision_projection")
    names: ClassVar[tuple[str, str]] = ("vision_encoder", "vision_projection")
    fixed: ClassVar[Mapping[str, Any]] = {
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
    }
