"""Weights of single experts as tensors that can be overwritten by those of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace_core.ops import PackedLinear
from headrace_models.layers.held_weights import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.layers.moe.experts import Experts


def slot_weights(experts: Experts) -> list[list[Tensor]] | None:
    """For each of this rank's slots all that distinguishes its expert from others, as views: contiguous
    tensors of the kernels' own layouts.

    Returns:
        None: experts are held in another form, by a method that cannot join them.
    """
    count = len(experts.halves)
    if experts.packed is not None:
        return _rows(tensors_in("", experts.packed), count)
    biases = [("", bias) for bias in experts.stacked_biases if bias is not None]
    if experts.apart is not None:
        return _rows([*tensors_in("", experts.apart), *biases], count)
    if experts.routed is None:
        return None
    found = _rows(biases, count)
    for slot, pair in enumerate(experts.states):
        if not all(isinstance(state, PackedLinear) for state in pair):
            return None
        found[slot] += [tensor for _, tensor in tensors_in("", pair)]
    return found


def _rows(tensors: Iterable[tuple[str, Tensor]], count: int) -> list[list[Tensor]]:
    """Stacked tensors [count, ...], by row."""
    whole = [tensor for _, tensor in tensors]
    return [[tensor[row] for tensor in whole] for row in range(count)]
