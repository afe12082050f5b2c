"""Filling a model from tensors that are already as its layers hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.loading.finite import check_finite
from headrace_models.loading.mapping import listed

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

    A leaf is loaded when its last tensor comes. Strict as :func:`headrace_models.loading.loader.load_model`.

    Args:
        path: of the checkpoint; for messages.

    Raises:
        WeightsError: a tensor is not finite; or some are missing, left over, repeated, or of the wrong
            shape or dtype, listed up to :data:`~headrace_models.loading.mapping.SHOWN`.
    """
    places = {f"{leaf}.{key}": (leaf, key) for leaf in slots for key in slots[leaf]}
    waiting: dict[str, dict[str, Tensor]] = {leaf: {} for leaf in leaves}
    seen: set[str] = set()
    faults: list[str] = []
    for name, tensor, file in tensors:
        leaf, key = places.get(name, ("", ""))
        tensor = _own_rows(slots[leaf][key], tensor) if leaf else tensor
        fault = _fault(slots[leaf][key], context, tensor) if leaf else "belongs to no layer"
        if name in seen:
            fault = "comes twice"
        if leaf:
            seen.add(name)
        if fault:
            faults.append(f"{file.name}: tensor {name!r} {list(tensor.shape)} {fault}")
        if faults:  # the rest is only looked at, for a whole list
            continue
        check_finite(name, tensor, file)
        waiting[leaf][key] = _own(leaves[leaf], context, tensor)
        if len(waiting[leaf]) == len(slots[leaf]):
            leaves[leaf].load(waiting.pop(leaf))
    for name, (leaf, key) in places.items():
        if slots[leaf][key].required and name not in seen:
            faults.append(f"tensor {name!r} {list(slots[leaf][key].shape)} is missing")
    if faults:
        raise WeightsError(f"{path}: {listed(faults, '; ')}")
    # What is left waits for optional tensors only, or for another leaf's.
    for leaf in sorted(waiting, key=lambda each: not slots[each]):
        leaves[leaf].load(waiting[leaf])


def _own_rows(slot: Slot, tensor: Tensor) -> Tensor:
    """This rank's rows of a vocabulary, out of all of them: in older states each rank has all."""
    part = slot.parts[0] if len(slot.parts) == 1 else None
    if part is None or part.span is None or slot.part_dim is None:
        return tensor
    if tuple(tensor.shape) != slot.source_shape(0):
        return tensor
    return tensor.narrow(slot.part_dim, part.start, part.size)


def _fault(slot: Slot, context: BuildContext, tensor: Tensor) -> str:
    """Text that says how a tensor does not fit; "" if it does."""
    dtype = getattr(torch, slot.dtype or context.dtype)
    if tuple(tensor.shape) == slot.shape and tensor.dtype == dtype:
        return ""
    return (
        f"is {tensor.dtype}, the model needs {dtype} {list(slot.shape)}: load with the settings it was "
        "saved with"
    )


def _own(leaf: WeightLayer, context: BuildContext, tensor: Tensor) -> Tensor:
    """The tensor on the model's device, in memory that the leaf may keep."""
    if context.device == "cpu" and leaf.takes_views:
        return tensor
    return tensor.clone() if context.device == "cpu" else tensor.to(context.device)
