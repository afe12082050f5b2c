"""Filling a model from tensors that are already as its layers hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError
from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def fill_slots(
    tensors: Iterable[tuple[str, Tensor, Path]],
    leaves: Mapping[str, WeightLayer],
    slots: Mapping[str, Mapping[str, Slot]],
    context: BuildContext,
    path: Path,
) -> None:
    """Give every leaf the tensors that are named after its slots (``layers.0.attention.qkv.weight``).

    A leaf is loaded when its last tensor comes. Strict as :func:`headrace_models.loader.load_model`.

    Args:
        path: of the checkpoint; for messages.

    Raises:
        WeightsError: a tensor is missing, left over, or of the wrong shape or dtype.
    """
    places = {f"{leaf}.{key}": (leaf, key) for leaf in slots for key in slots[leaf]}
    waiting: dict[str, dict[str, Tensor]] = {leaf: {} for leaf in leaves}
    for name, tensor, file in tensors:
        leaf, key = places.get(name, ("", ""))
        if leaf not in waiting or key in waiting[leaf]:
            why = "comes twice" if leaf else "belongs to no layer of the model"
            raise WeightsError(f"{file}: tensor {name!r} {list(tensor.shape)} {why}")
        held = waiting[leaf]
        held[key] = _own(slots[leaf][key], leaves[leaf], context, name, tensor, file)
        if len(held) == len(slots[leaf]):
            leaves[leaf].load(waiting.pop(leaf))
    # What is left waits for optional tensors only, or for another leaf's.
    for leaf in sorted(waiting, key=lambda each: not slots[each]):
        for key, slot in slots[leaf].items():
            if slot.required and key not in waiting[leaf]:
                raise WeightsError(f"{path}: tensor {f'{leaf}.{key}'!r} is missing")
        leaves[leaf].load(waiting[leaf])


def _own(
    slot: Slot, leaf: WeightLayer, context: BuildContext, name: str, tensor: Tensor, file: Path
) -> Tensor:
    dtype = getattr(torch, slot.dtype or context.dtype)
    if tuple(tensor.shape) != slot.shape or tensor.dtype != dtype:
        raise WeightsError(
            f"{file}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the model needs "
            f"{dtype} {list(slot.shape)}: load with the settings it was saved with"
        )
    if context.device == "cpu" and leaf.takes_views:
        return tensor
    return tensor.clone() if context.device == "cpu" else tensor.to(context.device)
