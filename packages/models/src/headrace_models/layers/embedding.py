"""Tables of vectors, by token or position. Every rank holds the whole table, or its tokens' rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace_models.layers.base import Part, Slot, WeightLayer, slot_of
from headrace_models.layers.linear import with_adapters
from headrace_models.layers.vocabulary import OwnRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace_core.linear import LinearMethod, LinearSpec
    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear
    from headrace_models.layers.vocabulary import VocabShard
    from headrace_models.lora.places import LinearPlace, TablePlace


def _with_adapters(place: TablePlace | None, found: Tensor, ids: Tensor) -> Tensor:
    """found [T, H], the rows of ids, with what their adapters add."""
    return place(found, ids) if place is not None and place.is_chosen else found


def _rows_slot(num_rows: int, size: int, shard: VocabShard | None) -> Slot:
    """The slot of a table in floats."""
    if shard is None:
        return Slot((num_rows, size))
    return Slot((shard.size, size), parts=(shard.part,))


class Embedding(WeightLayer):
    """See :class:`headrace_core.ops.EmbeddingOp`.

    Args:
        num_rows: of the whole table.
        beyond: the row of ids past the table; None: there are none.
        shard: the rows that this rank keeps; None: all.
    """

    low_rank: TablePlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    weight: Tensor

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_rows: int,
        size: int,
        *,
        beyond: int | None = None,
        shard: VocabShard | None = None,
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.num_rows, self.size, self.beyond = num_rows, size, beyond
        self.shard = shard
        self.own_rows = None if shard is None else OwnRows(context, shard, beyond=beyond)

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": _rows_slot(self.num_rows, self.size, self.shard)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        if self.own_rows is None:
            found = self.ops.embedding(ids, self.weight, beyond=self.beyond)
        else:
            found = self.own_rows(ids, lambda rows: self.ops.embedding(rows, self.weight))
        return _with_adapters(self.low_rank, found, ids)


class PackedEmbedding(WeightLayer):
    """A table that is also the head's weight: held once, packed for the head, its rows read out of
    that (:meth:`headrace_core.ops.LinearOp.rows`). Arguments as :class:`Embedding`'s."""

    low_rank: TablePlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_rows: int,
        size: int,
        *,
        shard: VocabShard | None = None,
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.takes_views = context.ops.linear.pack_copies
        self.adopts_packed = type(self).load is PackedEmbedding.load
        self.num_rows, self.size = num_rows, size
        self.shard = shard
        self.own_rows = None if shard is None else OwnRows(context, shard)
        self.packed: PackedLinear | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": _rows_slot(self.num_rows, self.size, self.shard)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"])

    def adopt(self, packed: PackedLinear, tensors: Mapping[str, Tensor]) -> None:
        self.packed = packed

    def weight(self) -> PackedLinear:
        """The packed table, once loaded."""
        assert self.packed is not None, self.name
        return self.packed

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        packed, look_up = self.weight(), self.ops.linear.rows
        if self.own_rows is None:
            found = look_up(ids, packed)
        else:
            found = self.own_rows(ids, lambda rows: look_up(rows, packed))
        return _with_adapters(self.low_rank, found, ids)


class QuantizedEmbedding(WeightLayer):
    """A table that stays as the checkpoint has quantized it; rows become numbers when they are looked up.

    Args:
        spec: of the rows that this rank keeps.
        shard: which these are; None: all.
    """

    low_rank: TablePlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self,
        context: BuildContext,
        spec: LinearSpec,
        method: LinearMethod,
        shard: VocabShard | None = None,
    ) -> None:
        self.name = spec.name
        self.spec, self.method = spec, method
        self.takes_views = method.takes_views
        self.num_rows = spec.out_features if shard is None else shard.vocab_size
        self.shard = shard
        self.own_rows = None if shard is None else OwnRows(context, shard)
        self.state: Any = None

    def slots(self) -> Mapping[str, Slot]:
        parts = [Part(self.num_rows) if self.shard is None else self.shard.part]
        return {key: slot_of(one, parts) for key, one in self.method.create(self.spec).items()}

    def replaced_slots(self) -> Mapping[str, int]:
        kept = self.method.kept_bytes(self.spec)
        return {} if kept is None else {"weight": kept}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.state = self.method.finish(self.spec, tensors)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, size]."""
        if self.own_rows is None:
            found = self.method.rows(self.state, ids)
        else:
            found = self.own_rows(ids, lambda rows: self.method.rows(self.state, rows))
        return _with_adapters(self.low_rank, found, ids)


Table = Embedding | PackedEmbedding | QuantizedEmbedding


class QuantizedTableHead(WeightLayer):
    """A head that multiplies with a :class:`QuantizedEmbedding`, which is held once; a bias is its own.

    Args:
        state: gives the table's state once that is loaded.
        part: the outputs that this rank has.
    """

    low_rank: LinearPlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self, spec: LinearSpec, method: LinearMethod, state: Callable[[], Any], part: Part
    ) -> None:
        self.name = spec.name
        self.spec, self.method, self.state, self.part = spec, method, state, part
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"bias": Slot((self.part.size,), parts=(self.part,))} if self.spec.bias else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.bias = tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, size] -> [T, num_rows]."""
        return with_adapters(self.low_rank, self.method.apply(self.state(), x, self.bias), x)
