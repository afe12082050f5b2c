"""RMS and layer norms."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import as_rows, describe, dtype_code, matrix, vector


class RMSNorm:
    """See :class:`headrace_core.ops.RMSNormOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.rms_norm

    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        dtype, shape = x.dtype, x.shape
        width = shape[-1]
        x, rows, inner, outer_stride, inner_stride = as_rows(x)
        weight, weight_code = norm_weight(weight, dtype, width)
        out = torch.empty(*shape, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, inner,
            outer_stride, inner_stride, eps, offset, dtype_code(dtype), weight_code,
        )  # fmt: skip
        return out


class AddRMSNorm:
    """See :class:`headrace_core.ops.AddRMSNormOp`; both results reuse the inputs' memory."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.add_rms_norm

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        dtype, (rows, width) = x.dtype, x.shape
        if residual.shape != x.shape or residual.dtype != dtype:
            raise ConfigError(f"add_rms_norm: residual is {describe(residual)}, x is {describe(x)}")
        x, residual = x.contiguous(), residual.contiguous()
        weight, weight_code = norm_weight(weight, dtype, width)
        pointer = x.data_ptr()
        self._kernel(
            pointer, pointer, residual.data_ptr(), weight.data_ptr(), rows, width, eps, offset,
            dtype_code(dtype), weight_code,
        )  # fmt: skip
        return x, residual


class MatchRMS:
    """See :class:`headrace_core.ops.optional.match_rms.MatchRMSOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.match_rms

    def __call__(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        if x.shape != like.shape or x.dtype is not like.dtype:
            raise ConfigError(f"match_rms: x is {describe(x)}, like is {describe(like)}")
        x, rows, x_stride = matrix(x)
        like, _, like_stride = matrix(like)
        width = x.shape[1]
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), like.data_ptr(), rows, width, x_stride, like_stride,
            least, dtype_code(x.dtype),
        )  # fmt: skip
        return out


class LayerNorm:
    """See :class:`headrace_core.ops.LayerNormOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.layer_norm

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        dtype, shape = x.dtype, x.shape
        width = shape[-1]
        x, rows, inner, outer_stride, inner_stride = as_rows(x)
        weight, weight_code = norm_weight(weight, dtype, width)
        if bias is not None:
            bias = vector(bias, weight.dtype, width, "layer_norm: bias")
        out = torch.empty(*shape, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), rows, width, inner, outer_stride,
            inner_stride, eps, dtype_code(dtype), weight_code,
        )  # fmt: skip
        return out


class AddLayerNorm:
    """See :class:`headrace_core.ops.AddLayerNormOp`; both results reuse the inputs' memory."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.add_layer_norm

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        dtype, (rows, width) = x.dtype, x.shape
        if residual.shape != x.shape or residual.dtype != dtype:
            raise ConfigError(
                f"add_layer_norm: residual is {describe(residual)}, x is {describe(x)}"
            )
        x, residual = x.contiguous(), residual.contiguous()
        weight, weight_code = norm_weight(weight, dtype, width)
        if bias is not None:
            bias = vector(bias, weight.dtype, width, "add_layer_norm: bias")
        pointer = x.data_ptr()
        self._kernel(
            pointer, pointer, residual.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), rows, width, eps, dtype_code(dtype),
            weight_code,
        )  # fmt: skip
        return x, residual


def norm_weight(weight: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, int]:
    """A norm's weight, in the rows' dtype or float32, and its dtype's code."""
    found = weight.dtype
    if found is not dtype and found is not torch.float32:
        raise ConfigError(f"norm weight is {describe(weight)}; it must be {dtype} or float32")
    return vector(weight, found, size, "norm weight"), dtype_code(found)
