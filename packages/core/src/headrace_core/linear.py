"""Storage and multiplication of a linear layer's weight: a quantization method's three verbs.

1. :meth:`LinearMethod.create` - which tensors the checkpoint must supply for a layer;
2. :meth:`LinearMethod.finish` - after loading: check, convert, pack;
3. :meth:`LinearMethod.apply` - multiply.

A model asks its :class:`QuantMethod` for a method per layer *by the layer's full name*, so that a
checkpoint can treat layers differently; it never asks which method is active.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops import OpTable, PackedLinear


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer, per rank once sharded."""

    name: str
    """Full module path, as the checkpoint spells it (``model.layers.0.self_attn.qkv_proj``)."""
    in_features: int
    out_parts: tuple[int, ...]
    """Output sizes of the checkpoint tensors that are fused here, in order (q, k, v)."""
    dtype: str
    """Type of the activations: ``float32``, ``float16`` or ``bfloat16``."""
    bias: bool = False
    part_names: tuple[str, ...] = ()
    """Full names of the checkpoint's modules that are fused here, one per entry of ``out_parts``,
    so that lists of layers to skip can be matched; empty if ``name`` is itself in the checkpoint."""

    @property
    def out_features(self) -> int:
        return sum(self.out_parts)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the checkpoint must supply."""

    shape: tuple[int, ...]
    """Shape of the fused tensor, all parts together."""
    dtype: str | None
    """None: any floating dtype, converted to the activations' dtype while loading."""
    part_dim: int | None = 0
    """Dimension along which fused parts are concatenated; None if the tensor belongs to all."""
    in_dim: int | None = None
    """Dimension along the input features (for sharding by input), None if there is none."""
    required: bool = True
    any_float: bool = False
    """The checkpoint's may be of any floating dtype, and is converted to ``dtype``."""
    by_part: bool = False
    """Along ``part_dim`` each fused part has one entry, whatever its size."""
    only_part: int | None = None
    """It belongs to this fused part alone; its suffix ends in ``@`` and the part's number."""


class LinearMethod(ABC):
    """Storage and arithmetic of one layer."""

    is_plain: ClassVar[bool] = False
    """True if the layer comes down to one floating weight, which :meth:`weight` gives; then several
    layers (experts) may be run by one op."""

    needs_whole: ClassVar[bool] = False
    """True if what a rank needs of a layer cannot be cut out of the checkpoint's tensors: one rank only."""

    takes_views: bool = False
    """True if :meth:`finish` keeps nothing of the tensors that it gets: they may then be views of
    the checkpoint's file, or of memory that the next layer's tensors will use."""

    adopts_packed: bool = False
    """True if :meth:`adopt` takes the weight as :meth:`headrace_core.ops.LinearOp.pack` makes it."""

    @abstractmethod
    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        """Tensors by their name's suffix after the layer's (``weight``, ``weight_scale``)."""

    @abstractmethod
    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
        """Turn loaded tensors into the state that :meth:`apply` takes. May free its input.

        Raises:
            WeightsError: a tensor's content cannot be used; names the layer.
        """

    def adopt(self, packed: PackedLinear) -> Any:
        """The state of :meth:`finish`, of a method that :attr:`adopts_packed`."""
        raise NotImplementedError(f"{type(self).__name__} packs in another way")

    def kept_bytes(self, spec: LinearSpec) -> int | None:
        """Bytes of what :meth:`finish` makes; None: as many as the tensors have that it takes."""
        return None

    def weight(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight [out_features, in_features] in ``spec.dtype``, of a method that :attr:`is_plain`.

        Raises:
            WeightsError: a tensor's content cannot be used; names the layer.
        """
        return tensors["weight"]

    @abstractmethod
    def apply(self, state: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in_features] -> [T, out_features], x's dtype."""

    def rows(self, state: Any, ids: Tensor) -> Tensor:
        """Rows of the weight, of a method that :meth:`QuantMethod.for_table` gives: ids [T] int64 ->
        [T, in_features], in the activations' dtype."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up rows")

    def apply_activated(
        self, ops: OpTable, state: Any, x: Tensor, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply and activate: [T, out_features].

        ``kind`` is of :data:`headrace_core.ops.ACTIVATIONS`. The bits are those of the two steps
        here; a method whose op does both in one pass overrides this.
        """
        return ops.activation(self.apply(state, x, bias), kind)

    def apply_gated(
        self, ops: OpTable, state: Any, x: Tensor, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply by gate and up, fused in that order: ``act(gate) * up`` [T, out_features / 2].

        ``kind`` is of :data:`headrace_core.ops.GATED_ACTIVATIONS`. The bits are those of the two steps
        here; a method whose op does both in one pass overrides this.
        """
        return ops.activation_and_mul(self.apply(state, x, bias), kind)

    def join(self, states: Sequence[Any]) -> Any:
        """Several layers' states, of one spec but for its name, as one for :meth:`apply_routed`; None:
        each is applied by itself."""
        return None

    def apply_routed(
        self,
        state: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Multiply by the layers that ``ids`` say, of joined states: see
        :class:`headrace_core.ops.ExpertLinearOp`; biases [E, out_features]."""
        raise NotImplementedError(f"{type(self).__name__} joins no layers")


@dataclass(frozen=True, slots=True)
class QuantNeed:
    """Requirements on a quantization method."""

    dtype: str
    device: str
    device_capability: tuple[int, int] | None = None


class QuantMethod(ABC):
    """A quantization scheme; the object behind an entry point of ``headrace.quantization``."""

    name: ClassVar[str]
    """Name that a user types; equal to the entry point's name."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> QuantMethod:
        """Build from a checkpoint's ``quantization_config``, or None for online quantization.

        Raises:
            ConfigError: the method needs a checkpoint made for it, or the block asks for
                something that it cannot do; names the key and the value.
        """

    @classmethod
    @abstractmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        """Reasons why this method cannot serve; empty = it can."""

    @abstractmethod
    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        """The method for one layer, by its name."""

    def for_table(self, spec: LinearSpec) -> LinearMethod | None:
        """The method of a table of vectors [out_features, in_features], which may be the head's weight
        too; None: it is plain."""
        return None

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """A checkpoint's tensors (name, tensor, file) with those that no layer takes as they are laid out
        anew, or as the floats that they stand for; all others unchanged.

        They are whole: what becomes floats here can be fused, reordered and divided over ranks at any
        row or column, and its layer's method is a plain one.

        Args:
            dtype: of the activations, which such floats get.
            passes_over: whether the model does without the tensor of a name, which need not be decoded.

        Raises: WeightsError naming file and tensor: it stands for no floats.
        """
        return tensors


class WeightEncoder(ABC):
    """A format that ``headrace quantize --to NAME`` writes; the class behind an entry point of
    ``headrace.weight_encoders``, made without arguments."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        """weight [N, K] of any floating dtype -> the tensors that stand for it, by their name's suffix
        after the layer's; None: the format does not take such a shape, and the layer stays in floats.

        Raises: WeightsError: it holds infinities or NaN.
        """

    @abstractmethod
    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        """The checkpoint's ``quantization_config``: of linear layers that are encoded, and left in floats."""
