"""Gates and weighted sums of vectors, one program a tile of a row.

Definitions and sources: :mod:`headrace_core.ops.rowwise`.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import OPENINGS
from headrace_kernels.triton.launch import dense, softplus

_BLOCK = 1024


@triton.jit
def _gate_kernel(
    x_ptr, gate_ptr, out_ptr, x_stride, gate_stride, size, run, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``run`` neighbours are opened by one gate."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + col // run, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if KIND == "silu":
        wide = wide * tl.sigmoid(wide)
    elif KIND == "sigmoid":
        wide = tl.sigmoid(wide)
    elif KIND == "softplus":
        wide = softplus(wide)
    tl.store(out_ptr + row * size + col, (x.to(tl.float32) * wide).to(x.dtype), mask=inside)


@triton.jit
def _mix_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, size, sums, x_row, x_inner, w_row, w_inner, r_row,
    r_inner, TERMS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, m = at // sums, at % sums
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_RESIDUAL:
        base = residual_ptr + row * r_row + m * r_inner + col
        total += tl.load(base, mask=inside, other=0.0).to(tl.float32)
    for n in tl.static_range(TERMS):
        x = tl.load(x_ptr + row * x_row + n * x_inner + col, mask=inside, other=0.0)
        total += tl.load(weight_ptr + row * w_row + m * w_inner + n) * x.to(tl.float32)
    tl.store(out_ptr + at * size + col, total.to(out_ptr.dtype.element_ty), mask=inside)


def gate(x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
    """See :class:`headrace_core.ops.GateOp`.

    Raises:
        ConfigError: activation is not one of :data:`headrace_core.ops.OPENINGS`, or gates are no part of x.
    """
    if activation is not None and activation not in OPENINGS:
        raise ConfigError(f"gate: activation = {activation!r}: must be one of {list(OPENINGS)}")
    if x.shape[0] != gate.shape[0] or not gate.shape[1] or x.shape[1] % gate.shape[1]:
        raise ConfigError(f"gate: x is {list(x.shape)}, gate is {list(gate.shape)}")
    x, gate = dense(x), dense(gate)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _gate_kernel[(rows, triton.cdiv(size, _BLOCK))](
            x, gate, out, x.stride(0), gate.stride(0), size, size // gate.shape[1],
            KIND=activation or "none", BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def mix(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """See :class:`headrace_core.ops.optional.mix.MixOp`."""
    x, weights = dense(x), dense(weights)
    residual = None if residual is None else dense(residual)
    (rows, terms, size), sums = x.shape, weights.shape[1]
    out = torch.empty((rows, sums, size), dtype=x.dtype, device=x.device)
    if rows:
        _mix_kernel[(rows * sums, triton.cdiv(size, _BLOCK))](
            x, weights, residual, out, size, sums, *x.stride()[:2], *weights.stride()[:2],
            *((0, 0) if residual is None else residual.stride()[:2]), TERMS=terms,
            HAS_RESIDUAL=residual is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out
