"""RMS and layer norm, and what else a row's own moments do to it, one program a row.

RMS norm: ``y = x / sqrt(mean(x^2) + eps) * (weight + offset)`` (Zhang & Sennrich 2019,
arXiv:1910.07467). Layer norm: ``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016,
arXiv:1607.06450). A row is held in registers as one tile of the next power of two, so the order
of its sums depends on the row's length alone: results are row-invariant.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.triton.launch import dense, num_warps, padded


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    offset,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows * hidden size may pass 2^31
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden_size
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    wide = x.to(tl.float32)  # the mean of squares overflows float16 at |x| > 255
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
        # Rounded before it is normalised: the norm must see what the next layer's residual holds.
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * hidden_size + cols, total, mask=inside)
        wide = total.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    out = wide * scale * (weight + offset)
    tl.store(out_ptr + row * hidden_size + cols, out.to(x.dtype), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden_size
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if ADD:  # rounded before it is normalised, as in _rms_norm_kernel
        residual = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * hidden_size + cols, total, mask=inside)
        wide = total.to(tl.float32)
    mean = tl.sum(wide, axis=0) / hidden_size
    # Two passes over registers: mean(x^2) - mean^2 loses everything when the mean is large.
    centred = tl.where(inside, wide - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / hidden_size + eps)
    out = centred * scale * tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden_size + cols, out.to(x.dtype), mask=inside)


@triton.jit
def _match_rms_kernel(
    x_ptr, like_ptr, out_ptr, x_stride, like_stride, size, least, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    like = tl.load(like_ptr + row * like_stride + cols, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    own, target = tl.sum(wide * wide, axis=0) / size, tl.sum(like * like, axis=0) / size
    factor = tl.sqrt(target / tl.where(own < least, least, own))
    tl.store(out_ptr + row * size + cols, (wide * factor).to(x.dtype), mask=inside)


@triton.jit
def _gaussian_topk_kernel(x_ptr, out_ptr, x_stride, size, deviations, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    x = tl.load(x_ptr + row * x_stride + cols, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    mean = tl.sum(wide, axis=0) / size
    centred = tl.where(inside, wide - mean, 0.0)
    cutoff = mean + tl.sqrt(tl.sum(centred * centred, axis=0) / size) * deviations
    above = wide - cutoff
    out = tl.where(above < 0.0, 0.0, above)  # not tl.maximum, which hides NaN
    tl.store(out_ptr + row * size + cols, out.to(x.dtype), mask=inside)


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    """See :class:`headrace_core.ops.optional.match_rms.MatchRMSOp`."""
    x, like = dense(x), dense(like)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = padded(size)
        _match_rms_kernel[(rows,)](
            x, like, out, x.stride(0), like.stride(0), size, least, BLOCK=block,
            num_warps=num_warps(block),
        )  # fmt: skip
    return out


def gaussian_topk(x: Tensor, deviations: float) -> Tensor:
    """See :class:`headrace_core.ops.optional.gaussian_topk.GaussianTopKOp`."""
    x, (rows, size) = dense(x), x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = padded(size)
        _gaussian_topk_kernel[(rows,)](
            x, out, x.stride(0), size, deviations, BLOCK=block, num_warps=num_warps(block)
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See :class:`headrace_core.ops.RMSNormOp`."""
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms(rows, None, weight, out, None, eps, offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.AddRMSNormOp`. Both results are new tensors."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms(_rows(x), _rows(residual), weight, out, total, eps, offset)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See :class:`headrace_core.ops.LayerNormOp`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_layer(_rows(x), None, weight, bias, out, None, eps)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.AddLayerNormOp`. Both results are new tensors."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_layer(_rows(x), _rows(residual), weight, bias, out, total, eps)
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x [..., H] as [rows, H] with adjacent values; a strided slice of rows is not copied."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch_rms(
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    num_rows, hidden_size = rows.shape
    if not num_rows:
        return
    block = padded(hidden_size)
    _rms_norm_kernel[(num_rows,)](
        rows,
        residual,
        weight.contiguous(),
        out,
        total,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        hidden_size,
        eps,
        offset,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )


def _launch_layer(
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    num_rows, hidden_size = rows.shape
    if not num_rows:
        return
    block = padded(hidden_size)
    _layer_norm_kernel[(num_rows,)](
        rows,
        residual,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        total,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        hidden_size,
        eps,
        ADD=residual is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )
