"""A projector that makes one vector of a square of neighbours: norm and MLP (Kimi-VL, Keye-VL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

EPS = 1e-5
PARTS = ("linear_1", "linear_2")
"""Names of the MLP's two products."""


def projector_rules(
    source: str, target: str, parts: tuple[str, str] = PARTS
) -> tuple[WeightRule, ...]:
    """Rules of a :class:`SquareProjector`."""
    up, down = parts
    return (
        WeightRule(f"{source}.pre_norm", f"{target}.norm"),
        WeightRule(f"{source}.{up}", f"{target}.mlp.up"),
        WeightRule(f"{source}.{down}", f"{target}.mlp.down"),
    )


class SquareProjector(Layer):
    """A norm of each state, or of adjacent ones together, and an MLP of adjacent ones.

    Args:
        name: as the checkpoint spells it.
        sizes: of a state, of adjacent ones together, and of a vector.
        parts: names of the MLP's two products, below ``name``.
        joined: the norm is of adjacent states together.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: tuple[int, int, int],
        *,
        parts: tuple[str, str] = PARTS,
        joined: bool = False,
        eps: float = EPS,
    ) -> None:
        state, unit, out = sizes
        self.unit = unit
        self.norm = LayerNorm(context, f"{name}.pre_norm", unit if joined else state, eps)
        up, down = (f"{name}.{part}" for part in parts)
        self.mlp = Projector(context, up, down, (unit, unit, out), "gelu")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, sizes[0]] -> [T * sizes[0] / sizes[1], sizes[2]]."""
        return self.mlp(self.norm(x.view(-1, self.norm.size)).view(-1, self.unit))
