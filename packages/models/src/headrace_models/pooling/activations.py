"""Activations within heads, by the ops' names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def elementwise(kind: str) -> Callable[[Tensor], Tensor]:
    """The function of one of :data:`headrace_core.ops.ACTIVATIONS`, for a few rows in float32."""
    return _ELEMENTWISE[kind]
