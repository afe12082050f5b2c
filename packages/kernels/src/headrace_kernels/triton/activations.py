"""Activations, plain and gated, one program a tile of 1024 values.

``silu(x) = x * sigmoid(x)``; ``gelu`` exact, ``x/2 * (1 + erf(x / sqrt 2))``; ``gelu_tanh`` its
approximation ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`` (Hendrycks & Gimpel 2016,
arXiv:1606.08415); ``relu``; ``relu2`` is relu squared (So et al. 2021, arXiv:2109.08668); xIELU.
Gated: ``act(x[..., :I]) * x[..., I:]`` (Shazeer 2020, arXiv:2002.05202), and gpt-oss's clamped form.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import (
    ACTIVATIONS,
    CLAMPED_SWIGLU_ALPHA,
    CLAMPED_SWIGLU_LIMIT,
    GATED_ACTIVATIONS,
)

_BLOCK = 1024
_ALPHA = tl.constexpr(CLAMPED_SWIGLU_ALPHA)
_LIMIT = tl.constexpr(CLAMPED_SWIGLU_LIMIT)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """x float32, any shape."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u); sigmoid saturates where a quotient of powers overflows.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        # Not tl.maximum, which turns NaN into 0 and so hides a broken layer.
        y = tl.where(x < 0.0, 0.0, x)
        if KIND == "relu2":
            y = y * y
    return y


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """Gated value, by one of :data:`headrace_core.ops.GATED_ACTIVATIONS`; all float32."""
    if KIND == "clamped_swiglu":
        # Not tl.minimum, for the reason above.
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, up)
        up = tl.where(up < -_LIMIT, -_LIMIT, up)
        return (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    else:
        return _activate(gate, KIND) * up


@triton.jit
def _activation_kernel(x_ptr, out_ptr, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    y = _activate(x.to(tl.float32), KIND)  # exp and erf exist in float32 only
    tl.store(out_ptr + index, y.to(x.dtype), mask=inside)


@triton.jit
def _activation_and_mul_kernel(
    x_ptr, out_ptr, x_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    gate = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + size + col, mask=inside, other=0.0)
    # The product is taken in float32: rounding the activation first would cost a bit.
    y = gated(gate.to(tl.float32), up.to(tl.float32), KIND)
    tl.store(out_ptr + row * size + col, y.to(gate.dtype), mask=inside)


@triton.jit
def _xielu_kernel(x_ptr, out_ptr, numel, alpha_p, alpha_n, beta, eps, BLOCK: tl.constexpr):
    """``alpha_n (expm1(min(x, eps)) - x) + beta x``, or above 0 ``alpha_p x^2 + beta x``."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    loaded = tl.load(x_ptr + index, mask=inside, other=0.0)
    x = loaded.to(tl.float32)
    low = tl.where(x > eps, eps, x)
    # exp(low) - 1 - low, by its series where the difference would lose its digits.
    series = low * (1 / 5040) + 1 / 720
    series = series * low + 1 / 120
    series = series * low + 1 / 24
    series = series * low + 1 / 6
    series = series * low + 0.5
    rest = tl.where(low < -0.4, tl.exp(low) - 1.0 - low, series * low * low)
    bent = tl.where(x > 0.0, alpha_p * x * x, alpha_n * (rest + (low - x)))
    tl.store(out_ptr + index, (bent + beta * x).to(loaded.dtype), mask=inside)


def xielu(
    x: Tensor, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """See :class:`headrace_core.ops.optional.xielu.XIELUOp`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _xielu_kernel[grid](x, out, x.numel(), alpha_p, alpha_n, beta, eps, BLOCK=_BLOCK)
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    """See :class:`headrace_core.ops.ActivationOp`.

    Raises:
        ConfigError: kind is not one of :data:`headrace_core.ops.ACTIVATIONS`.
    """
    _check(kind)
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), _BLOCK),)
        _activation_kernel[grid](x, out, x.numel(), KIND=kind, BLOCK=_BLOCK)
    return out


def activation_and_mul(x: Tensor, kind: str) -> Tensor:
    """See :class:`headrace_core.ops.ActivationAndMulOp`.

    Raises:
        ConfigError: kind is not one of :data:`headrace_core.ops.GATED_ACTIVATIONS`.
    """
    check_gate(kind)
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(size, _BLOCK))
        _activation_and_mul_kernel[grid](rows, out, rows.stride(0), size, KIND=kind, BLOCK=_BLOCK)
    return out


def check_gate(kind: str) -> None:
    """Raises: ConfigError: nothing of that name stands between a gate and what it lets through."""
    _check(kind, GATED_ACTIVATIONS)


def _check(kind: str, kinds: Sequence[str] = ACTIVATIONS) -> None:
    if kind not in kinds:
        raise ConfigError(f"activation kind {kind!r} is unknown; kinds are {list(kinds)}")
