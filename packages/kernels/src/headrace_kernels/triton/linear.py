"""A linear layer in a fixed order: ``out = x @ weight.T + bias``, for the batch-invariant mode.

Without the mode, linear layers are the vendor's, which chooses tiles, and cuts the inputs, by the number of
rows. Here tiles have one size for all batches and a program takes all inputs of its tile in order, so that a
row's bits depend on no other row. It is slower: a step of one row computes a tile of 32.
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
from headrace_kernels.triton.activations import activation, activation_and_mul
from headrace_kernels.triton.launch import dense, padded, widen

_ROWS, _OUTPUTS, _INPUTS = 32, 64, 64
"""Sizes of a tile."""


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, N, K, x_row, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # N * K may pass 2^31
    row_ok, col_ok = row < num_rows, col < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + row[:, None] * x_row + k[None, :],
            mask=row_ok[:, None] & (k < K)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + col[None, :] * K + k[:, None],
            mask=col_ok[None, :] & (k < K)[:, None],
            other=0.0,
        )
        if WIDEN:  # see launch.widen
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc += tl.dot(x, weight, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * N + col[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


class FixedOrderLinear:
    """See :class:`headrace_core.ops.LinearOp`. Packing keeps the weight as it is, unless it has gaps."""

    pack_copies = False

    def pack(self, weight: Tensor) -> PackedLinear:
        dtype = str(weight.dtype).removeprefix("torch.")
        num_bytes = weight.numel() * weight.element_size()
        return PackedLinear(weight.shape[1], weight.shape[0], dtype, weight.contiguous(), num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, (rows, inputs), outputs = dense(x), x.shape, packed.out_features
        if inputs != packed.in_features:
            raise ConfigError(f"linear: x is {list(x.shape)}, packed for [*, {packed.in_features}]")
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        if rows:
            block_n, block_k = min(_OUTPUTS, padded(outputs, 16)), min(_INPUTS, padded(inputs, 16))
            grid = (triton.cdiv(rows, _ROWS), triton.cdiv(outputs, block_n))
            _linear_kernel[grid](
                x, packed.data, packed.data if bias is None else bias, out, rows, outputs, inputs,
                x.stride(0), HAS_BIAS=bias is not None, BLOCK_M=_ROWS, BLOCK_N=block_n,
                BLOCK_K=block_k, WIDEN=widen(x), num_warps=4,
            )  # fmt: skip
        return out

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return activation(self(x, packed, bias), kind)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return activation_and_mul(self(x, packed, bias), kind)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        found: Tensor = packed.data[ids]
        return found
