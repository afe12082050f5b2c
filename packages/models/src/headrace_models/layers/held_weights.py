"""Weights of a loaded leaf as tensors, for functions that look at a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace_core.ops import OpTable, PackedLinear

if TYPE_CHECKING:
    from headrace_models.layers.base import WeightLayer


def weights_of(leaf: WeightLayer) -> Iterator[tuple[str, Tensor]]:
    """The attributes of a leaf that hold tensors; a packed linear weight that is not quantized as
    ``weight``, in the shape of its slot."""
    slot = leaf.slots().get("weight")
    method, ops = getattr(leaf, "method", None), getattr(leaf, "ops", None)
    plain = None if slot is None or not (method is None or method.is_plain) else slot.shape
    for name, value in vars(leaf).items():
        if isinstance(value, PackedLinear) and ops is not None and shape_of(value) == plain:
            yield "weight", unpacked(ops, value)
        else:
            yield from tensors_in(name, value)


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors in an attribute of a leaf, as they lie in memory: of a packed weight what its kernel made of
    it, in the kernel's own layout.

    Args:
        name: of the attribute; parts of it are numbered or named below it.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, PackedLinear):
        yield from tensors_in(name, value.data)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(f"{name}.{index}", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if isinstance(item := getattr(value, field.name, None), Tensor):
                yield f"{name}.{field.name}", item


def shape_of(packed: PackedLinear) -> tuple[int, int]:
    """[out_features, in_features]."""
    return packed.out_features, packed.in_features


def unpacked(ops: OpTable, packed: PackedLinear) -> Tensor:
    """The weight [out_features, in_features] that ``ops.linear`` packed: the tensor itself where it was kept
    as it is, else a copy."""
    data = packed.data
    if isinstance(data, Tensor) and data.shape == shape_of(packed):
        return data
    device = data.device if isinstance(data, Tensor) else None
    return ops.linear.rows(torch.arange(packed.out_features, device=device), packed)
