"""Tables of vectors, by token or position. Every rank holds the whole table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


class Embedding(WeightLayer):
    """See :class:`headrace_core.ops.EmbeddingOp`.

    Args:
        beyond: the row of ids past the table; None: there are none.
    """

    weight: Tensor

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_rows: int,
        size: int,
        *,
        beyond: int | None = None,
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.num_rows, self.size, self.beyond = num_rows, size, beyond

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.num_rows, self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        return self.ops.embedding(ids, self.weight, beyond=self.beyond)


class PackedEmbedding(WeightLayer):
    """A table that is also the head's weight: held once, packed for the head, its rows read out of
    that (:meth:`headrace_core.ops.LinearOp.rows`)."""

    def __init__(self, context: BuildContext, name: str, num_rows: int, size: int) -> None:
        self.name = name
        self.ops = context.ops
        self.takes_views = context.ops.linear.pack_copies
        self.num_rows, self.size = num_rows, size
        self.packed: PackedLinear | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.num_rows, self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"])

    def weight(self) -> PackedLinear:
        """The packed table, once loaded."""
        assert self.packed is not None, self.name
        return self.packed

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        return self.ops.linear.rows(ids, self.weight())
