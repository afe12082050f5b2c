"""Sums, multiples, copies and widening of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import OPENINGS
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import NAMES, describe, dtype_code, matrix, unit_last


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


_OPENINGS: Mapping[str | None, int] = {
    None: 0,
    **{name: code for code, name in enumerate(OPENINGS, start=1)},
}


class Gate:
    """See :class:`headrace_core.ops.GateOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.gate

    def __call__(self, x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
        width, gates = x.shape[1], gate.shape[1]
        if x.shape[0] != gate.shape[0] or not gates or width % gates or x.dtype is not gate.dtype:
            raise ConfigError(
                f"gate: x is {describe(x)}, gate is {describe(gate)}; there must be a gate for each of "
                "x, or for each of some neighbours"
            )
        if activation not in _OPENINGS:
            raise ConfigError(f"gate: activation {activation!r}: must be one of {list(_OPENINGS)}")
        x, rows, x_stride = matrix(x)
        gate, _, gate_stride = matrix(gate)
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), gate.data_ptr(), rows, width, gates, x_stride,
            gate_stride, _OPENINGS[activation], dtype_code(x.dtype),
        )  # fmt: skip
        return out


class Clamp:
    """See :class:`headrace_core.ops.optional.clamp.ClampOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.clamp

    def __call__(self, x: Tensor, low: float, high: float) -> Tensor:
        x, rows, stride = matrix(x)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), rows, width, stride, low, high, dtype_code(x.dtype)
        )
        return out


class CopyRows:
    """See :class:`headrace_core.ops.CopyRowsOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.copy_rows

    def __call__(self, x: Tensor, out: Tensor) -> None:
        alike = x.shape == out.shape and x.dtype is out.dtype and x.dim() in (2, 3)
        if not alike or (out.stride(-1) != 1 and out.shape[-1] > 1):
            raise ConfigError(
                f"copy_rows: x is {describe(x)}, out is {describe(out)} of strides "
                f"{list(out.stride())}"
            )
        x, item = unit_last(x), x.element_size()
        rows, inner, width = x.shape[0], x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
        strides = [
            stride * item
            for tensor in (out, x)
            for stride in (tensor.stride(0), tensor.stride(1) if x.dim() == 3 else 0)
        ]
        self._kernel(out.data_ptr(), x.data_ptr(), rows, inner, width * item, *strides)


class Mix:
    """See :class:`headrace_core.ops.optional.mix.MixOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.mix

    def __call__(self, x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        (rows, terms, width), sums = x.shape, weights.shape[1]
        if weights.shape != (rows, sums, terms) or weights.dtype is not torch.float32:
            raise ConfigError(f"mix: x is {describe(x)}, weights are {describe(weights)}")
        strides: Sequence[int] = (0, 0)
        address = None
        if residual is not None:
            if residual.shape != (rows, sums, width) or residual.dtype is not x.dtype:
                raise ConfigError(
                    f"mix: residual is {describe(residual)}; it must be {NAMES.get(x.dtype)} "
                    f"{[rows, sums, width]}"
                )
            residual = unit_last(residual)
            strides, address = residual.stride()[:2], residual.data_ptr()
        x, weights = unit_last(x), unit_last(weights)
        out = torch.empty(rows, sums, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weights.data_ptr(), address, rows, sums, terms, width,
            *x.stride()[:2], *weights.stride()[:2], *strides, dtype_code(x.dtype),
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
