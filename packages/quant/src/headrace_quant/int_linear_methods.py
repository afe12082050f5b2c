"""Linear layers of integers: rounded while loading, or stored in one of two layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight, Rounding

if TYPE_CHECKING:
    from torch import Tensor


class IntegerMethod(LinearMethod):
    """Base of methods that multiply integers."""

    def __init__(self, ops: OpTable, *, activations: str) -> None:
        self.ops = ops
        self.activations = activations

    def pack(self, spec: LinearSpec, weight: QuantizedWeight) -> PackedLinear:
        return self.ops.quant_linear.pack(weight, spec.dtype, activations=self.activations)

    def apply(self, state: PackedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.ops.quant_linear(x, state, bias)

    def apply_gated(
        self,
        ops: OpTable,
        state: PackedLinear,
        x: Tensor,
        kind: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        return ops.quant_linear.gated(x, state, kind, bias)

    def join(self, states: Sequence[PackedLinear]) -> PackedLinear | None:
        return self.ops.quant_linear.join(states)

    def apply_routed(
        self,
        state: PackedLinear,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        return self.ops.quant_linear.routed(x, state, ids, weights, biases)


class RoundedWeight(IntegerMethod):
    """``weight`` of any floating dtype, rounded into its packed form when it has arrived.

    Raises (from ``finish``):
        WeightsError: the weight holds infinities or NaN.
    """

    takes_views = True

    def __init__(self, ops: OpTable, rounding: Rounding, *, activations: str) -> None:
        super().__init__(ops, activations=activations)
        self.rounding = rounding

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def kept_bytes(self, spec: LinearSpec) -> int:
        """Integers, and float32 scales of outputs or bfloat16 scales of groups."""
        rows, columns, group = spec.out_features, spec.in_features, self.rounding.group_size
        scales = 4 * rows if group is None else 2 * rows * -(-columns // group)
        return rows * columns * self.rounding.bits // 8 + scales

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        try:
            return self.ops.quant_linear.round(
                tensors["weight"], spec.dtype, self.rounding, activations=self.activations
            )
        except WeightsError as error:
            raise WeightsError(f"layer {spec.name!r}: {error}") from None


class StoredInt8(IntegerMethod):
    """``weight`` int8 [N, K] and ``weight_scale`` [N, 1]."""

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {
            "weight": TensorSpec((spec.out_features, spec.in_features), "int8", in_dim=1),
            "weight_scale": scale_spec((spec.out_features, 1), None),
        }

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        scales = checked_scales(spec, tensors["weight_scale"])
        return self.pack(spec, QuantizedWeight(tensors["weight"], scales))


@dataclass(frozen=True, slots=True)
class WordFormat:
    """Format of a ``pack-quantized`` layer."""

    bits: int
    group_size: int | None
    """None: one scale per output."""
    has_zeros: bool

    @property
    def codes(self) -> int:
        """In a word."""
        return 32 // self.bits


class PackedWords(IntegerMethod):
    """``weight_packed`` int32 [N, K * bits / 32], ``weight_scale`` [N, groups] and, if the codes
    have zero points, ``weight_zero_point`` int32 [N * bits / 32, groups].

    A word holds 32 / bits codes, value + 2^(bits - 1), the first in its lowest bits; weights are
    packed along the inputs, zero points along the outputs. Served where words end with rows, parts
    and groups.
    """

    optional: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ops: OpTable, form: WordFormat, *, activations: str) -> None:
        super().__init__(ops, activations=activations)
        self.form = form

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        codes, size = self.form.codes, self.form.group_size
        _must_divide(spec, "in_features", spec.in_features, codes, "format 'pack-quantized'")
        if size is not None:
            _must_divide(spec, "in_features", spec.in_features, size, f"group_size {size}")
        groups = 1 if size is None else spec.in_features // size
        in_dim = None if size is None else 1
        wanted = {
            "weight_packed": TensorSpec(
                (spec.out_features, spec.in_features // codes), "int32", in_dim=1
            ),
            "weight_scale": scale_spec((spec.out_features, groups), in_dim),
        }
        if self.form.has_zeros:
            for part in spec.out_parts:
                _must_divide(spec, "out_features", part, codes, "zero points in words")
            wanted["weight_zero_point"] = TensorSpec(
                (spec.out_features // codes, groups), "int32", in_dim=in_dim
            )
        return wanted

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        bits, zeros = self.form.bits, None
        if self.form.has_zeros:
            words = tensors["weight_zero_point"].T.contiguous()
            zeros = unpack_words(words, bits).T.contiguous()
        weight = QuantizedWeight(
            unpack_words(tensors["weight_packed"].contiguous(), bits),
            checked_scales(spec, tensors["weight_scale"]),
            zeros,
            bits=bits,
            group_size=self.form.group_size,
        )
        return self.pack(spec, weight)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """words [R, C] int32, contiguous -> signed codes [R, C * 32 / bits] int8."""
    bytes_ = words.view(torch.uint8)
    if bits == 8:
        return (bytes_ ^ 128).view(torch.int8)
    both = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1)
    return both.view(words.shape[0], -1).view(torch.int8) - 8


def scale_spec(shape: tuple[int, ...], in_dim: int | None) -> TensorSpec:
    """Scales of any floating dtype, kept exact."""
    return TensorSpec(shape, "float32", in_dim=in_dim, any_float=True)


def checked_scales(spec: LinearSpec, scales: Tensor) -> Tensor:
    """The same, contiguous.

    Raises:
        WeightsError: a scale is negative, infinite or no number.
    """
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise WeightsError(f"layer {spec.name!r}: weight_scale holds values that are not scales")
    return scales.float().contiguous()


def _must_divide(spec: LinearSpec, what: str, size: int, by: int, why: str) -> None:
    if size % by:
        raise ConfigError(
            f"layer {spec.name!r}: {what} = {size}: {why} is served for multiples of {by} only"
        )
