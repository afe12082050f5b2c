"""A small linear layer for each head: ``out[t, h] = weight[h] @ x[t, h]``.

A program multiplies a tile of rows by a tile of one head's outputs. Tiles have one size for all batches, so
a row's bits do not depend on the others.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import PackedLinear
from headrace_kernels.triton.launch import dense, padded, widen

_ROWS = 32
"""Rows of a tile."""


@triton.jit
def _head_linear_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, heads, N, K, x_row, x_head, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    col = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, col_ok = row < num_rows, col < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + row[:, None] * x_row + head * x_head + k[None, :],
            mask=row_ok[:, None] & (k < K)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + (head * N + col)[None, :] * K + k[:, None],
            mask=col_ok[None, :] & (k < K)[:, None],
            other=0.0,
        )
        if WIDEN:  # see launch.widen
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc += tl.dot(x, weight, input_precision="ieee")
    out = out_ptr + (row[:, None] * heads + head) * N + col[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


class HeadLinear:
    """See :class:`headrace_core.ops.HeadLinearOp`. Packing keeps the weight as it is."""

    def pack(self, weight: Tensor) -> PackedLinear:
        dtype = str(weight.dtype).removeprefix("torch.")
        num_bytes = weight.numel() * weight.element_size()
        return PackedLinear(weight.shape[2], weight.shape[1], dtype, weight.contiguous(), num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        x, (rows, heads, inputs) = dense(x), x.shape
        if (heads, inputs) != (packed.data.shape[0], packed.in_features):
            raise ConfigError(
                f"head_linear: x is {list(x.shape)}, packed for [*, {packed.data.shape[0]}, "
                f"{packed.in_features}]"
            )
        outputs = packed.out_features
        out = torch.empty((rows, heads, outputs), dtype=x.dtype, device=x.device)
        if rows:
            block_n, block_k = min(64, padded(outputs, 16)), min(64, padded(inputs, 16))
            grid = (triton.cdiv(rows, _ROWS), heads, triton.cdiv(outputs, block_n))
            _head_linear_kernel[grid](
                x, packed.data, out, rows, heads, outputs, inputs, *x.stride()[:2], BLOCK_M=_ROWS,
                BLOCK_N=block_n, BLOCK_K=block_k, WIDEN=widen(x), num_warps=4,
            )  # fmt: skip
        return out
