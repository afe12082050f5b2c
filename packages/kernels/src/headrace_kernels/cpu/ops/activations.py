"""Elementwise activations."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import activation_code, dtype_code, gate_code, matrix


class Activation:
    """See :class:`headrace_core.ops.ActivationOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.activation

    def __call__(self, x: Tensor, kind: str) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(
            out.data_ptr(), x.data_ptr(), x.numel(), activation_code(kind), dtype_code(x.dtype)
        )
        return out


class ActivationAndMul:
    """See :class:`headrace_core.ops.ActivationAndMulOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.activation_and_mul

    def __call__(self, x: Tensor, kind: str) -> Tensor:
        x, rows, stride = matrix(x)
        width = x.shape[1] // 2
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(),
            x.data_ptr(),
            rows,
            width,
            stride,
            gate_code(kind),
            dtype_code(x.dtype),
        )
        return out


class GaussianTopK:
    """See :class:`headrace_core.ops.optional.gaussian_topk.GaussianTopKOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.gaussian_topk

    def __call__(self, x: Tensor, deviations: float) -> Tensor:
        x, rows, stride = matrix(x)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), rows, width, stride, deviations, dtype_code(x.dtype)
        )
        return out


class XIELU:
    """See :class:`headrace_core.ops.optional.xielu.XIELUOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.xielu

    def __call__(
        self, x: Tensor, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(
            out.data_ptr(), x.data_ptr(), x.numel(), alpha_p, alpha_n, beta, eps,
            dtype_code(x.dtype),
        )  # fmt: skip
        return out
