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

    A leaf's tensors come together. Strict as :func:`headrace_models.loader.load_model`.

    Args:
        path: of the checkpoint; for messages.

    Raises:
        WeightsError: a tensor is missing, left over, or of the wrong shape or dtype.
    """
    places = {f"{leaf}.{key}": (leaf, key) for leaf in slots for key in slots[leaf]}
    held: dict[str, Tensor] = {}
    current: str | None = None
    loaded: set[str] = set()

    def complete(leaf: str) -> None:
        missing = [key for key, slot in slots[leaf].items() if slot.required and key not in held]
        if missing:
            raise WeightsError(f"{path}: tensor {f'{leaf}.{missing[0]}'!r} is missing")
        leaves[leaf].load(dict(held))
        loaded.add(leaf)
        held.clear()

    for name, tensor, file in tensors:
        leaf, key = places.get(name, (None, ""))
        if leaf is None or leaf in loaded:
            why = "belongs to no layer of the model" if leaf is None else "comes too late, or twice"
            raise WeightsError(f"{file}: tensor {name!r} {list(tensor.shape)} {why}")
        if current is not None and leaf != current:
            complete(current)
        current = leaf
        held[key] = _own(slots[leaf][key], leaves[leaf], context, name, tensor, file)
    if current is not None:
        complete(current)
    for leaf in sorted(leaves, key=lambda each: not slots[each]):  # tied ones last
        if leaf not in loaded:
            complete(leaf)


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
