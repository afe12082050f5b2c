"""Pixtral's projectors: the states of patches become vectors, perhaps a square of them one.

Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.pixtral import tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def merging_rules(tower: str, projector: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`~headrace_models.layers.vision.towers.pixtral.PixtralTower` called ``tower`` and a
    :class:`MergingProjector` called ``projector`` in a model.

    Args:
        tower, projector: their names in the checkpoint.
    """
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
        merge: side of a square in patches; None: every patch is a vector, and there is no such product.
        eps: of the norm; None: there is none.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: tuple[int, int],
        *,
        merge: int | None,
        eps: float | None,
        activation: str,
        bias: bool,
    ) -> None:
        inner, hidden = sizes
        self.merge = merge or 1
        self.norm = None if eps is None else RMSNorm(context, f"{name}.norm", inner, eps)
        self.merger: Linear | None = None
        if merge is not None:
            layer = f"{name}.patch_merger.merging_layer"
            self.merger = Linear(context, layer, inner * merge**2, [Part(inner)])
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
        flat = torch.cat(squares)
        vectors = self.mlp(flat if self.merger is None else self.merger(flat))
        return list(torch.split(vectors, [len(own) for own in squares]))

    def _squares(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, inner] -> [squares, inner * merge ** 2]: the patches' first numbers, then their
        second ones ..."""
        merge = self.merge
        down, across = rows // merge, columns // merge
        normed = states if self.norm is None else self.norm(states)
        grid = normed.view(rows, columns, -1)[: down * merge, : across * merge]
        squares = grid.reshape(down, merge, across, merge, -1).permute(0, 2, 4, 1, 3)
        return squares.reshape(down * across, -1)
