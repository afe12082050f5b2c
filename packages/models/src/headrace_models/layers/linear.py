"""Linear layers: fused by output, cut over ranks by output (column) or input (row)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearMethod, LinearSpec
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.parallel import Communicator
    from headrace_models.lora.places import LinearPlace


def shard_of(units: int, communicator: Communicator, *, what: str) -> Shard:
    """The spread of ``units`` indivisible things (heads, columns) over the ranks.

    With fewer units than ranks (key-value heads), neighbouring ranks keep the same one.

    Raises:
        UnsupportedModel: neither number divides the other; names ``what``.
    """
    world, rank = communicator.world_size, communicator.rank
    if units % world == 0:
        return Shard(world, rank)
    if world % units == 0:
        return Shard(units, rank // (world // units))
    fitting = ", ".join(str(n) for n in range(1, units + 1) if units % n == 0)
    raise UnsupportedModel(
        f"{what}: {units} heads or columns cannot be divided over tensor_parallel_size = {world}: it must "
        f"be a divisor of {units} ({fitting}) or a multiple of it"
    )


def dividing_shard(units: int, communicator: Communicator, *, what: str) -> Shard:
    """Piece as :func:`shard_of` gives it, but no two ranks keep the same: for what is summed over the ranks.

    Raises:
        UnsupportedModel: the ranks do not divide ``units``; names ``what``.
    """
    world = communicator.world_size
    if units % world:
        raise UnsupportedModel(
            f"{what} = {units} must be divisible by tensor_parallel_size = {world}"
        )
    return Shard(world, communicator.rank)


def with_adapters(place: LinearPlace | None, out: Tensor, x: Tensor) -> Tensor:
    """out [T, N] of a layer's x [T, K], with what its rows' adapters add."""
    return place(out, x) if place is not None and place.is_chosen else out


class Linear(WeightLayer):
    """``x @ weight.T + bias`` by the quantization method's choice for this layer.

    Args:
        name: as the checkpoint spells it.
        parts: fused outputs, as this rank keeps them.
        part_names: the checkpoint's names of the fused modules, if it has them apart.
        in_shard: which columns of the weight this rank keeps.
        reduce: sum the result over the ranks.
        unbiased: with ``bias``, the fused parts whose module has none.

    Raises:
        UnsupportedModel: there are several ranks, and the method needs whole layers.
    """

    low_rank: LinearPlace | None = None
    """The layer's adapters; None: it takes none."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        in_features: int,
        parts: Sequence[Part],
        *,
        bias: bool = False,
        part_names: tuple[str, ...] = (),
        in_shard: Shard = WHOLE,
        reduce: bool = False,
        unbiased: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.communicator = context.communicator
        self.parts = tuple(parts)
        self.in_shard = in_shard
        self.unbiased = unbiased
        self.reduce = reduce and context.communicator.world_size > 1
        self.spec = LinearSpec(
            name=name,
            in_features=in_features,
            out_parts=tuple(part.size for part in parts),
            dtype=context.dtype,
            bias=bias,
            part_names=part_names,
        )
        self.method = context.quant.for_layer(self.spec)
        if self.method.needs_whole and context.communicator.world_size > 1:
            raise UnsupportedModel(
                f"{name}: the way in which its weights are quantized cannot be divided over "
                f"tensor_parallel_size = {context.communicator.world_size}: set 1"
            )
        self.takes_views = self.method.takes_views
        # A subclass that loads in its own way may change the weight before it is packed.
        self.adopts_packed = self.method.adopts_packed and type(self).load is Linear.load
        self.state: Any = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        wanted = {
            suffix: slot_of(tensor, self.parts, self.in_shard)
            for suffix, tensor in self.method.create(self.spec).items()
        }
        if self.spec.bias:
            parts = [part for i, part in enumerate(self.parts) if i not in self.unbiased]
            wanted["bias"] = Slot((sum(part.size for part in parts),), parts=tuple(parts))
        return wanted

    def replaced_slots(self) -> Mapping[str, int]:
        kept = self.method.kept_bytes(self.spec)
        if kept is None:
            return {}
        return {**dict.fromkeys(self.method.create(self.spec), 0), "weight": kept}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(tensors)
        self._take_bias(own.pop("bias", None))
        self.state = self.method.finish(self.spec, own)

    def adopt(self, packed: PackedLinear, tensors: Mapping[str, Tensor]) -> None:
        self._take_bias(tensors.get("bias"))
        self.state = self.method.adopt(packed)

    def _take_bias(self, bias: Tensor | None) -> None:
        # Every rank of a row-parallel layer holds the whole bias; the sum may contain it once.
        self.bias = None if self.reduce and self.communicator.rank else bias
        if self.bias is not None and self.unbiased:
            self.bias = self._with_zeros(self.bias)
        elif self.bias is not None and self.takes_views:
            self.bias = self.bias.clone()

    def _with_zeros(self, bias: Tensor) -> Tensor:
        """The bias of all outputs: zeros where a part has none."""
        whole, start, given = bias.new_zeros(self.spec.out_features), 0, 0
        for index, part in enumerate(self.parts):
            if index not in self.unbiased:
                whole[start : start + part.size] = bias[given : given + part.size]
                given += part.size
            start += part.size
        return whole

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features], both as this rank holds them."""
        out = self.method.apply(self.state, x, self.bias)
        out = with_adapters(self.low_rank, out, x)
        return self.communicator.all_reduce(out) if self.reduce else out

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """``act`` of the layer: x [T, in_features] -> [T, out_features]."""
        assert not self.reduce, self.name
        if self.low_rank is not None and self.low_rank.is_chosen:
            return self.ops.activation(self(x), activation)
        return self.method.apply_activated(self.ops, self.state, x, activation, self.bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """``act(gate(x)) * up(x)`` of a layer whose two parts are gate and up, of equal size:
        x [T, in_features] -> [T, out_features / 2]."""
        assert not self.reduce, self.name
        if self.low_rank is not None and self.low_rank.is_chosen:
            return self.ops.activation_and_mul(self(x), activation)
        return self.method.apply_gated(self.ops, self.state, x, activation, self.bias)


def column_parallel(
    context: BuildContext,
    name: str,
    in_features: int,
    out_parts: Sequence[int],
    *,
    units: Sequence[int] | None = None,
    bias: bool = False,
    unbiased: tuple[int, ...] = (),
    part_names: tuple[str, ...] = (),
) -> Linear:
    """A layer whose outputs are spread over the ranks.

    Args:
        out_parts: whole output sizes of the fused parts.
        units: indivisible things per part (heads); default: single outputs.
        unbiased: see :class:`Linear`.
    """
    parts: list[Part] = []
    for index, size in enumerate(out_parts):
        count = size if units is None else units[index]
        shard = shard_of(count, context.communicator, what=f"{name}, part {index}")
        parts.append(Part(size // shard.count, shard, count))
    return Linear(
        context, name, in_features, parts, bias=bias, part_names=part_names, unbiased=unbiased
    )


def row_parallel(
    context: BuildContext, name: str, in_features: int, out_features: int, *, bias: bool = False
) -> Linear:
    """A layer whose inputs are spread over the ranks; the result is summed over them."""
    shard = shard_of(in_features, context.communicator, what=f"{name}, inputs")
    return Linear(
        context,
        name,
        in_features // shard.count,
        [Part(out_features)],
        bias=bias,
        in_shard=shard,
        reduce=True,
    )


class PlainLinear(WeightLayer):
    """A small layer that no method quantizes (a router)."""

    low_rank: LinearPlace | None = None
    """See :class:`Linear`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
    ) -> None:
        self.name = name
        self.has_bias = bias
        self.bias: Tensor | None = None
        self.ops = context.ops
        self.takes_views = context.ops.linear.pack_copies
        self.shape = (out_features, in_features)
        self.packed: PackedLinear | None = None

    def slots(self) -> Mapping[str, Slot]:
        wanted = {"weight": Slot(self.shape)}
        return {**wanted, "bias": Slot(self.shape[:1])} if self.has_bias else wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"])
        if self.has_bias:
            self.bias = tensors["bias"].clone()

    def __call__(self, x: Tensor) -> Tensor:
        assert self.packed is not None, self.name
        return with_adapters(self.low_rank, self.ops.linear(x, self.packed, self.bias), x)


class TiedLinear(WeightLayer):
    """A layer whose weight is another layer's (the head that is the embedding); a bias is its own.

    Args:
        packed: gives the other layer's weight once that is loaded.
        part: the outputs that this rank has.
    """

    low_rank: LinearPlace | None = None
    """See :class:`Linear`."""

    def __init__(
        self,
        context: BuildContext,
        spec: LinearSpec,
        packed: Callable[[], PackedLinear],
        part: Part,
    ) -> None:
        self.name, self.spec, self.part = spec.name, spec, part
        self.ops = context.ops
        self.packed = packed
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"bias": Slot((self.part.size,), parts=(self.part,))} if self.spec.bias else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.bias = tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        return with_adapters(self.low_rank, self.ops.linear(x, self.packed(), self.bias), x)


class QuantizedTiedLinear(WeightLayer):
    """A layer that multiplies with a quantized copy of another layer's floating weight.

    Costs the copy's memory; a step then reads the copy, which is smaller, and not the weight.

    Args:
        method: makes integers of floating weights (:func:`quantizes_floats`).
        weight: gives the other layer's weight once that is loaded.
        part: the outputs that this rank has.
    """

    low_rank: LinearPlace | None = None
    """See :class:`Linear`."""

    def __init__(
        self, spec: LinearSpec, method: LinearMethod, weight: Callable[[], Tensor], part: Part
    ) -> None:
        self.name = spec.name
        self.spec, self.method, self.weight, self.part = spec, method, weight, part
        self.state: Any = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        """A bias that need not be there, for a leaf with one that must be could come before the other
        layer."""
        if not self.spec.bias:
            return {}
        return {"bias": Slot((self.part.size,), parts=(self.part,), required=False)}

    def replaced_slots(self) -> Mapping[str, int]:
        kept = self.method.kept_bytes(self.spec)
        return {} if kept is None else {"weight": kept}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.bias = tensors.get("bias")
        self.state = self.method.finish(self.spec, {"weight": self.weight()})

    def __call__(self, x: Tensor) -> Tensor:
        assert self.state is not None, self.name
        return with_adapters(self.low_rank, self.method.apply(self.state, x, self.bias), x)


def quantizes_floats(method: LinearMethod, spec: LinearSpec) -> bool:
    """True if the method makes a floating weight something else while loading."""
    tensors = dict(method.create(spec))
    weight = tensors.pop("weight", None)
    return not method.is_plain and weight is not None and weight.dtype is None and not tensors
