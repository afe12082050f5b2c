"""Weights of a loaded leaf as tensors, for functions that look at a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import OpTable, PackedLinear


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


def unpacked(ops: OpTable, packed: PackedLinear) -> Tensor:
    """The weight [out_features, in_features] that ``ops.linear`` packed: the tensor itself where it was kept
    as it is, else a copy."""
    data = packed.data
    if isinstance(data, Tensor) and data.shape == (packed.out_features, packed.in_features):
        return data
    device = data.device if isinstance(data, Tensor) else None
    return ops.linear.rows(torch.arange(packed.out_features, device=device), packed)
