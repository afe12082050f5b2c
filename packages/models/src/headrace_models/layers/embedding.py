"""Tables of vectors, by token or position. Every rank holds the whole table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class Embedding(WeightLayer):
    """See :class:`headrace_core.ops.EmbeddingOp`."""

    weight: Tensor

    def __init__(self, context: BuildContext, name: str, num_rows: int, size: int) -> None:
        self.name = name
        self.ops = context.ops
        self.num_rows, self.size = num_rows, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.num_rows, self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        return self.ops.embedding(ids, self.weight)
