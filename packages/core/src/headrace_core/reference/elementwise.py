"""Sums, multiples and widening of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.reference.dtypes import widened


def add(x: Tensor, y: Tensor) -> Tensor:
    """See :class:`headrace_core.ops.AddOp`."""
    return x + y


def scale(x: Tensor, factor: float) -> Tensor:
    """See :class:`headrace_core.ops.ScaleOp`."""
    return (widened(x) * factor).to(x.dtype)


def gate(x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
    """See :class:`headrace_core.ops.GateOp`."""
    wide = widened(gate)
    if activation is not None:
        wide = F.silu(wide) if activation == "silu" else torch.sigmoid(wide)
    return (widened(x) * wide).to(x.dtype)


def to_float32(x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
    """See :class:`headrace_core.ops.ToFloat32Op`."""
    wide = widened(x)
    return wide if soft_cap <= 0 else torch.tanh(wide / soft_cap) * soft_cap
