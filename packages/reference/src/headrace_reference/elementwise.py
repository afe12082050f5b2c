"""Sums, multiples, copies and widening of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_reference.dtypes import unset_like, widened

_OPENINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


def add(x: Tensor, y: Tensor) -> Tensor:
    """See :class:`headrace_core.ops.AddOp`."""
    return x + y


def fake_add(x: Tensor, y: Tensor) -> Tensor:
    return unset_like(x)


def scale(x: Tensor, factor: float) -> Tensor:
    """See :class:`headrace_core.ops.ScaleOp`."""
    return (widened(x) * factor).to(x.dtype)


def fake_scale(x: Tensor, factor: float) -> Tensor:
    return unset_like(x)


def gate(x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
    """See :class:`headrace_core.ops.GateOp`.

    Raises:
        ConfigError: activation is not one of :data:`headrace_core.ops.OPENINGS`.
    """
    wide = widened(gate)
    if activation is not None:
        try:
            wide = _OPENINGS[activation](wide)
        except KeyError:
            raise ConfigError(
                f"gate: activation = {activation!r}: must be one of {list(_OPENINGS)}"
            ) from None
    if gate.shape != x.shape:
        wide = wide.repeat_interleave(x.shape[1] // gate.shape[1], dim=1)
    return (widened(x) * wide).to(x.dtype)


def fake_gate(x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
    return unset_like(x, *x.shape)


def copy_rows(x: Tensor, out: Tensor) -> None:
    """See :class:`headrace_core.ops.CopyRowsOp`."""
    out.copy_(x)


def fake_copy_rows(x: Tensor, out: Tensor) -> None:
    return None


def to_float32(x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
    """See :class:`headrace_core.ops.ToFloat32Op`."""
    wide = widened(x)
    return wide if soft_cap <= 0 else torch.tanh(wide / soft_cap) * soft_cap


def fake_to_float32(x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)
