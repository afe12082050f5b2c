"""Packed weights whose activations enter in the form that a user chose, whatever their format says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_core.ops import PackedLinear, QuantizedWeight, QuantLinearOp, Rounding

if TYPE_CHECKING:
    from torch import Tensor


class FixedActivations:
    """A :class:`headrace_core.ops.QuantLinearOp` that packs for one form of activations only.

    Args:
        op: packs and multiplies.
        activations: one of :data:`headrace_core.ops.QUANT_ACTIVATIONS`.
    """

    def __init__(self, op: QuantLinearOp, activations: str) -> None:
        self._op, self._activations = op, activations

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        return self._op.pack(weight, dtype, activations=self._activations)

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        return self._op.round(weight, dtype, rounding, activations=self._activations)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return self._op(x, packed, bias)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return self._op.gated(x, packed, kind, bias)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        return self._op.rows(ids, packed)

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        return self._op.join(each)

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        return self._op.routed(x, packed, ids, weights, biases)
