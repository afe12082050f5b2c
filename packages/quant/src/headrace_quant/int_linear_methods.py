"""Linear layers of packed weights; and of integers that are rounded while loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_core.errors import WeightsError
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
