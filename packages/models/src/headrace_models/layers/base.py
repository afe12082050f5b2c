"""The tree that a model is: layers that hold layers, and leaves that hold weights.

No torch module: a leaf's loaded weight is whatever a quantization method or a kernel made of it,
which need not be a tensor, and nothing here is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.linear import TensorSpec
    from headrace_core.ops import PackedLinear


class Layer:
    """A piece of a model. Its pieces are its attributes, or lists in its attributes."""

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Direct pieces in the order of their making, which is the order of execution."""
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Layer):
                        yield f"{name}.{index}", item

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of this piece and of those below, by dotted name.

        A fused layer (query, key and value) is one tensor. A plain weight has its shape and the
        activations' dtype; where a kernel keeps it in another layout, the tensor is a copy, made when it is
        reached. Weights that are quantized, or that several experts share, come as their kernels hold them.
        """
        seen: set[int] = set()
        for path, leaf in [("", self), *walk(self)]:
            if isinstance(leaf, WeightLayer) and id(leaf) not in seen:
                seen.add(id(leaf))
                for name, tensor in leaf.held():
                    yield f"{path}.{name}".lstrip("."), tensor

    def parameters(self) -> Iterator[Tensor]:
        """The tensors of :meth:`named_parameters`."""
        return (tensor for _, tensor in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """All of :meth:`named_parameters` at once: where it makes copies, as much memory again as the
        weights take."""
        return dict(self.named_parameters())


def walk(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Every piece below ``layer`` with its dotted path, parents first."""
    for name, child in layer.children():
        full = f"{path}.{name}" if path else name
        yield full, child
        yield from walk(child, full)


@dataclass(frozen=True, slots=True)
class Shard:
    """The one of several equal pieces of an axis that this rank keeps."""

    count: int = 1
    index: int = 0


WHOLE = Shard()


class Span(NamedTuple):
    """A piece of an axis, whatever pieces the other ranks keep."""

    start: int
    whole: int
    """Length of the axis."""


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor within a fused one, along its part dimension."""

    size: int
    """The piece that this rank keeps of it."""
    shard: Shard = WHOLE
    units: int = 1
    """Indivisible things (heads) in the whole of it, all ranks together."""
    span: Span | None = None
    """Where the piece lies, of pieces that need not be equal (rows of a vocabulary); None: as ``shard``
    says."""

    @property
    def start(self) -> int:
        """Where this rank's piece begins in the whole."""
        return self.shard.index * self.size if self.span is None else self.span.start

    @property
    def whole(self) -> int:
        """Size of it in the checkpoint."""
        return self.size * self.shard.count if self.span is None else self.span.whole

    def scaled(self, extent: int, total: int) -> Part:
        """The part of a tensor with ``extent`` entries for each ``total`` of the layer's outputs.

        Raises: UnsupportedModel: they cannot be cut in that proportion.
        """
        span = self.span
        sizes = (self.size,) if span is None else (self.size, span.start, span.whole)
        if any(size * extent % total for size in sizes):
            raise UnsupportedModel(
                f"a tensor of {extent} rows for {total} outputs cannot be cut in proportion to {self}"
            )
        scaled = [size * extent // total for size in sizes]
        return replace(self, size=scaled[0], span=None if span is None else Span(*scaled[1:]))


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that a leaf waits for, and which piece of the checkpoint's tensors goes into it."""

    shape: tuple[int, ...]
    """Shape on this rank, all parts together."""
    dtype: str | None = None
    """None: any floating dtype, converted to the activations'."""
    parts: tuple[Part, ...] = ()
    """Along ``part_dim``; empty: one part, unsharded."""
    part_dim: int | None = 0
    in_dim: int | None = None
    in_shard: Shard = WHOLE
    required: bool = True
    any_float: bool = False
    """Any floating dtype is taken, and converted to ``dtype``."""
    only_part: int | None = None
    """The slot is for this part of a fused layer, whose parts are stored differently; it has one part."""
    copies: int = 1
    """How often this rank keeps the tensor; 0: other ranks do. It must be in the checkpoint all the same."""

    @property
    def num_parts(self) -> int:
        return max(1, len(self.parts))

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Shape on this rank of one part."""
        shape = list(self.shape)
        if self.parts and self.part_dim is not None:
            shape[self.part_dim] = self.parts[part].size
        return tuple(shape)

    def source_shape(self, part: int) -> tuple[int, ...]:
        """Shape of one part as the checkpoint holds it, before sharding."""
        shape = list(self.part_shape(part))
        if self.parts and self.part_dim is not None:
            shape[self.part_dim] = self.parts[part].whole
        if self.in_dim is not None:
            shape[self.in_dim] *= self.in_shard.count
        return tuple(shape)


class WeightLayer(Layer, ABC):
    """A leaf: it says what it needs and takes it once it is complete."""

    name: str
    """Full name, as the checkpoint spells it; for messages."""
    takes_views: bool = False
    """True if :meth:`load` keeps nothing of its tensors: they may then be views of the
    checkpoint's file, or of memory that is used again for the next leaf."""
    adopts_packed: bool = False
    """True if :meth:`adopt` takes the slot ``weight`` as :meth:`headrace_core.ops.LinearOp.pack` makes it."""
    no_adapters: str = ""
    """Why the leaf takes no low-rank adapters, where one of its kind usually does."""
    is_twin: bool = False
    """True of an object that loads tensors in the place of the leaf, which gets its state later
    (:mod:`headrace_models.loading.update`): it writes into nothing but itself."""

    @abstractmethod
    def slots(self) -> Mapping[str, Slot]:
        """Needed tensors by their name below the leaf (``weight``). Leaves without any are
        loaded last."""

    def replaced_slots(self) -> Mapping[str, int]:
        """Bytes of what :meth:`load` keeps in the place of a slot's tensor, where that is something
        else (integers)."""
        return {}

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors, of the slots' shapes and dtypes, on the model's device."""

    def adopt(self, packed: PackedLinear, tensors: Mapping[str, Tensor]) -> None:
        """As :meth:`load`, with the weight packed already, of a leaf that :attr:`adopts_packed`.

        Args:
            tensors: of the other slots.
        """
        raise NotImplementedError(f"{type(self).__name__} packs in another way")

    def publish(self) -> None:
        """Write what the leaf holds where others read it, if they do; the leaf has got another's state."""
        return

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """The leaf's weights once it is loaded, by name (``weight``): see :meth:`named_parameters`."""
        from headrace_models.layers.held_weights import weights_of

        yield from weights_of(self)


def slot_of(
    spec: TensorSpec,
    out_parts: Sequence[Part],
    in_shard: Shard = WHOLE,
) -> Slot:
    """The slot of a quantization method's tensor in a layer with ``out_parts``.

    A tensor's extent per part follows the parts' sizes in proportion, so that eight values packed
    into one word along the output also work.
    """
    if spec.only_part is not None:
        out_parts = (out_parts[spec.only_part],)
    parts: tuple[Part, ...] = ()
    if spec.part_dim is not None:
        extent, total = spec.shape[spec.part_dim], sum(part.size for part in out_parts)
        if not spec.by_part:
            parts = tuple(part.scaled(extent, total) for part in out_parts)
    elif len(out_parts) > 1:
        parts = tuple(out_parts)  # each fused module has one, and they must be equal
    if spec.by_part:
        parts = tuple(Part(1) for _ in out_parts)
    return Slot(
        shape=tuple(spec.shape),
        dtype=spec.dtype,
        parts=parts,
        part_dim=spec.part_dim,
        in_dim=spec.in_dim,
        in_shard=in_shard if spec.in_dim is not None else WHOLE,
        required=spec.required,
        any_float=spec.any_float,
        only_part=spec.only_part,
    )
