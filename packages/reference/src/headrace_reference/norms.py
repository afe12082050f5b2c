"""Normalisations over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See :class:`headrace_core.ops.RMSNormOp`."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


def fake_rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    return unset_like(x)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.AddRMSNormOp`."""
    total = x + residual
    return rms_norm(total, weight, eps, offset=offset), total


def fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return unset_like(x), unset_like(x)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.AddLayerNormOp`."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def fake_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return unset_like(x), unset_like(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See :class:`headrace_core.ops.LayerNormOp`."""
    wide = widened(x)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    out = centred * scale * weight.to(wide.dtype)
    if bias is not None:
        out = out + bias.to(wide.dtype)
    return out.to(x.dtype)


def fake_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return unset_like(x)
