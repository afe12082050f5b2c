"""A number and a bias for each channel of a stream.

Letters: T tokens, H channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def every_row(weight: Tensor, like: Tensor) -> Tensor:
    """weight [H] as [T, H], the same memory for each of ``like``'s rows: what a step is captured of."""
    return weight.as_strided(like.shape, (0, 1))


class RowScale(WeightLayer):
    """``(x + bias) * scale``.

    Args:
        name: what both names begin with, as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, name: str, size: int) -> None:
        self.name, self.ops, self.size = name, context.ops, size

    def slots(self) -> Mapping[str, Slot]:
        return {"scale": Slot((self.size,)), "bias": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.scale = tensors["scale"]
        self.added = (tensors["bias"].float() * self.scale.float()).to(self.scale.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        scaled = self.ops.gate(x, every_row(self.scale, x))
        return self.ops.add(scaled, every_row(self.added, x))
