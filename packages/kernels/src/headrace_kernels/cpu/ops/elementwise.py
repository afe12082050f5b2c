"""Sums, multiples and widening of rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import describe, dtype_code, matrix


class Add:
    """See :class:`headrace_core.ops.AddOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.add

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape or x.dtype is not y.dtype:
            raise ConfigError(f"add: x is {describe(x)}, y is {describe(y)}")
        x, rows, x_stride = matrix(x)
        y, _, y_stride = matrix(y)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), y.data_ptr(), rows, width, x_stride, y_stride,
            dtype_code(x.dtype),
        )  # fmt: skip
        return out


class Scale:
    """See :class:`headrace_core.ops.ScaleOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.scale

    def __call__(self, x: Tensor, factor: float) -> Tensor:
        x, rows, stride = matrix(x)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(out.data_ptr(), x.data_ptr(), rows, width, stride, factor, dtype_code(x.dtype))
        return out


_OPENINGS: Mapping[str | None, int] = {None: 0, "silu": 1, "sigmoid": 2}


class Gate:
    """See :class:`headrace_core.ops.GateOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.gate

    def __call__(self, x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
        if x.shape != gate.shape or x.dtype is not gate.dtype:
            raise ConfigError(f"gate: x is {describe(x)}, gate is {describe(gate)}")
        if activation not in _OPENINGS:
            raise ConfigError(f"gate: activation {activation!r}: must be one of {list(_OPENINGS)}")
        x, rows, x_stride = matrix(x)
        gate, _, gate_stride = matrix(gate)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), gate.data_ptr(), rows, width, x_stride, gate_stride,
            _OPENINGS[activation], dtype_code(x.dtype),
        )  # fmt: skip
        return out


class ToFloat32:
    """See :class:`headrace_core.ops.ToFloat32Op`; x itself if there is nothing to do."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.to_float32

    def __call__(self, x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
        if x.dtype is torch.float32 and soft_cap <= 0:
            return x
        x, rows, stride = matrix(x)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=torch.float32)
        self._kernel(
            out.data_ptr(), x.data_ptr(), rows, width, stride, soft_cap, dtype_code(x.dtype)
        )
        return out
