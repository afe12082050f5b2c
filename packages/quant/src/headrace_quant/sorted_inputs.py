"""Weights whose inputs were quantized in the order of their importance (``desc_act``, ``actorder: group``).

``g_idx`` [K] says to which group of scales each input belongs. Such weights are held sorted by group, and
activations are brought into the same order before they are multiplied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.int_linear_methods import IntegerMethod

if TYPE_CHECKING:
    from torch import Tensor


class Sorted(NamedTuple):
    """A weight whose inputs are in another order than the activations'."""

    order: Tensor
    """[K] int64: place among the activations of each input of the weight."""
    weight: PackedLinear


def sorted_order(spec: LinearSpec, groups: Tensor, size: int, name: str) -> Tensor | None:
    """The inputs sorted by group; None: they are.

    Args:
        groups: [K], the group of each input; a rank's begin anywhere.
        size: inputs of a group.
        name: of the tensor, for the message.

    Raises:
        WeightsError: groups of unequal size.
    """
    groups = groups.long() - int(groups.min())
    expected = torch.arange(spec.in_features, device=groups.device) // size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise WeightsError(
            f"layer {spec.name!r}: {name} has groups of other sizes than group_size = {size}"
        )
    return order


class SortedMethod(IntegerMethod):
    """Base of methods whose state is a packed weight, or a :class:`Sorted` one."""

    def apply(self, state: PackedLinear | Sorted, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(state, Sorted):
            return super().apply(state.weight, x.index_select(-1, state.order), bias)
        return super().apply(state, x, bias)

    def apply_gated(
        self,
        ops: OpTable,
        state: PackedLinear | Sorted,
        x: Tensor,
        kind: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        if isinstance(state, Sorted):
            x, state = x.index_select(-1, state.order), state.weight
        return super().apply_gated(ops, state, x, kind, bias)

    def join(self, states: Any) -> PackedLinear | None:
        if any(isinstance(state, Sorted) for state in states):
            return None  # each has an order of its own
        return super().join(states)
