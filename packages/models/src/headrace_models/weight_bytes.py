"""Memory that a model takes once it is filled, estimated from one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from headrace_models.layers.base import Layer, WeightLayer, walk


def kept_bytes(model: Layer, dtype: str) -> int:
    """Bytes of a model's weights and tables on this rank.

    Exact for the tensors; what a kernel pads or keeps besides is not in it.

    Args:
        model: built, not loaded: of the tensors that it holds (rotary tables) each is counted once.
        dtype: of floating weights.
    """
    leaves = (leaf for _, leaf in walk(model) if isinstance(leaf, WeightLayer))
    weights = sum(leaf_bytes(leaf, dtype) for leaf in leaves)
    tables = {table.untyped_storage().data_ptr(): table for table in _tables(model)}
    return weights + sum(table.untyped_storage().nbytes() for table in tables.values())


def leaf_bytes(leaf: WeightLayer, dtype: str) -> int:
    """Bytes of a leaf's weights on this rank; arguments as :func:`kept_bytes`'s."""
    sizes: Mapping[str, int] = {
        name: slot.copies * math.prod(slot.shape) * getattr(torch, slot.dtype or dtype).itemsize
        for name, slot in leaf.slots().items()
        if slot.required
    }
    return sum({**sizes, **leaf.replaced_slots()}.values())


def _tables(model: Layer) -> Iterator[torch.Tensor]:
    """Tensors that are attributes of the model's pieces."""
    for piece in [model, *(piece for _, piece in walk(model))]:
        for value in vars(piece).values():
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                yield value
