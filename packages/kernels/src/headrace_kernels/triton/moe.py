"""Experts: grouped products over tokens sorted by expert, two of them for gated ones.

Each (row, place) of ``topk_ids`` is one entry. Entries are sorted by expert and laid out in blocks of
BLOCK_M, none of which holds two experts; a program multiplies one block by one tile of its expert's
weight. How many blocks there are is known only on the device: as many programs start as there can be
blocks, and those beyond the last do nothing. Results go to the entry's own line, and a row sums its
lines in the order of its places, so no addition depends on which program came first.

A row's products run over the inner dimension in tiles of one size; with ``batch_invariant`` so do the
tiles of rows, and a row's bits then do not depend on the others.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import PackedLinear
from headrace_kernels.triton.activations import check_gate, gated
from headrace_kernels.triton.launch import dense, padded, widen

_FEW, _MANY = 16, 64
"""Rows of a block, by how many an expert has on average."""


@triton.jit
def _experts_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    entry_ptr,
    expert_ptr,
    x_stride,
    num_entries,
    num_experts,
    N,
    K,
    PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[entry, n] = row (entry // PER_ROW) of x times row n of its expert's weight, plus bias; GATED:
    of rows n and N + n, a gate and what it lets through."""
    block = tl.program_id(0)
    expert = tl.load(expert_ptr + block).to(tl.int64)
    if expert >= num_experts:
        return
    entry = tl.load(entry_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    row_ok = entry < num_entries
    rows = (entry // PER_ROW).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = col < N
    outputs = 2 * N if GATED else N
    weight_ptr += expert * outputs * K

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + k[None, :],
            mask=row_ok[:, None] & (k < K)[None, :],
            other=0.0,
        )
        where = col.to(tl.int64)[None, :] * K + k[:, None]
        ok = col_ok[None, :] & (k < K)[:, None]
        weight = tl.load(weight_ptr + where, mask=ok, other=0.0)
        if WIDEN:  # see launch.widen
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc += tl.dot(x, weight, input_precision="ieee")
        if GATED:
            up = tl.load(weight_ptr + N * K + where, mask=ok, other=0.0)
            if WIDEN:
                up = up.to(tl.float32)
            up_acc += tl.dot(x, up, input_precision="ieee")
    if HAS_BIAS:
        bias_ptr += expert * outputs
        acc += tl.load(bias_ptr + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up_acc += tl.load(bias_ptr + N + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        acc = gated(acc, up_acc, KIND)
    out = out_ptr + entry.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _sum_places_kernel(lines_ptr, weights_ptr, out_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum over its K places of weight * line, in order."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < size
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(K):
        line = tl.load(lines_ptr + (row * K + place) * size + col, mask=inside, other=0.0)
        total += tl.load(weights_ptr + row * K + place) * line
    tl.store(out_ptr + row * size + col, total.to(out_ptr.dtype.element_ty), mask=inside)


class _Sorted(NamedTuple):
    """Entries by expert, in blocks."""

    entries: Tensor
    """[blocks * BLOCK_M] int32; places that hold none have a number beyond the last entry."""
    experts: Tensor
    """[blocks] int32; of blocks beyond the last, the number of experts."""


def sort_entries(topk_ids: Tensor, num_experts: int, block: int) -> _Sorted:
    """Lay out the entries of topk_ids [T, k]; without waiting for the device."""
    ids = topk_ids.flatten()
    count, device = ids.shape[0], ids.device
    # With n entries and E experts at most min(E, n) blocks are not full.
    blocks = count // block + min(num_experts, count)
    sizes = torch.zeros(num_experts, dtype=torch.int64, device=device)
    sizes.scatter_add_(0, ids, torch.ones_like(ids))
    ends = torch.cumsum((sizes + block - 1) // block, 0)  # of each expert's blocks
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    rank = torch.arange(count, device=device) - (torch.cumsum(sizes, 0) - sizes)[sorted_ids]
    first = (ends - (sizes + block - 1) // block)[sorted_ids]
    entries = torch.full((blocks * block,), count, dtype=torch.int32, device=device)
    entries[first * block + rank] = order.int()
    experts = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True)
    return _Sorted(entries, experts.int())


class MoE:
    """See :class:`headrace_core.ops.MoEOp`. Packing keeps the weights as they are.

    Args:
        batch_invariant: one size of blocks for all batches.
    """

    pack_copies = False

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def pack(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> PackedLinear:
        experts, double, hidden = gate_up.shape
        if tuple(down.shape) != (experts, hidden, double // 2) or down.dtype != gate_up.dtype:
            raise ConfigError(
                f"moe: gate_up is {gate_up.dtype} {list(gate_up.shape)}, so down must be "
                f"[{experts}, {hidden}, {double // 2}]; it is {down.dtype} {list(down.shape)}"
            )
        tensors = (gate_up, down, gate_up_bias, down_bias)
        return PackedLinear(
            in_features=hidden,
            out_features=hidden,
            dtype=str(gate_up.dtype).removeprefix("torch."),
            data=tuple(None if tensor is None else tensor.contiguous() for tensor in tensors),
            num_bytes=(gate_up.numel() + down.numel()) * gate_up.element_size(),
        )

    def __call__(
        self,
        x: Tensor,
        packed: PackedLinear,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        kind: str,
        *,
        identities: int = 0,
        identity_scale: float = 1.0,
    ) -> Tensor:
        check_gate(kind)
        gate_up, down, gate_up_bias, down_bias = packed.data
        rows, top_k = topk_ids.shape
        if not rows:
            return torch.empty((0, packed.out_features), dtype=x.dtype, device=x.device)
        experts, size, inner = down.shape
        entries = rows * top_k
        block = _block(entries, experts, self.batch_invariant)
        # Kernels skip what goes to experts beyond the last.
        ids = topk_ids.clamp(max=experts) if identities else topk_ids
        where = sort_entries(ids, experts + (identities > 0), block)
        hidden = torch.empty((entries, inner), dtype=x.dtype, device=x.device)
        lines = torch.empty((entries, size), dtype=torch.float32, device=x.device)
        x = dense(x)
        _product(hidden, x, gate_up, gate_up_bias, where, block, top_k, kind)
        _product(lines, hidden, down, down_bias, where, block, 1, None)
        if identities:
            same = (ids == experts).view(entries, 1)
            own = (x.float() * identity_scale).repeat_interleave(top_k, dim=0)
            lines = torch.where(same, own, lines)
        weights = (
            torch.ones_like(ids, dtype=torch.float32) if topk_weights is None else topk_weights
        )
        return _sum_places(lines, weights, x.dtype)


class ExpertLinear:
    """See :class:`headrace_core.ops.ExpertLinearOp`. Packing keeps the weights as they are.

    Args:
        batch_invariant: one size of blocks for all batches.
    """

    pack_copies = False

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def pack(self, weight: Tensor) -> PackedLinear:
        dtype = str(weight.dtype).removeprefix("torch.")
        num_bytes = weight.numel() * weight.element_size()
        return PackedLinear(weight.shape[2], weight.shape[1], dtype, weight.contiguous(), num_bytes)

    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        (rows, top_k), size = ids.shape, packed.out_features
        entries, dtype = rows * top_k, x.dtype if weights is None else torch.float32
        lines = torch.empty((entries, size), dtype=dtype, device=x.device)
        if rows:
            experts = packed.data.shape[0]
            block = _block(entries, experts, self.batch_invariant)
            where = sort_entries(ids, experts, block)
            shared = x.dim() == 2
            inputs = dense(x) if shared else x.reshape(entries, -1)
            _product(
                lines, inputs, packed.data, None, where, block, top_k if shared else 1, None
            )  # fmt: skip
        if weights is None:
            return lines.view(rows, top_k, size)
        return _sum_places(lines, weights, x.dtype)


def _block(entries: int, experts: int, batch_invariant: bool) -> int:
    """Rows of a block."""
    return _MANY if entries > _FEW * experts and not batch_invariant else _FEW


def _sum_places(lines: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """lines [T * k, N] by weights [T, k] -> [T, N]."""
    (rows, top_k), size = weights.shape, lines.shape[1]
    out = torch.empty((rows, size), dtype=dtype, device=lines.device)
    if rows:
        tile = min(1024, padded(size))
        _sum_places_kernel[(rows, triton.cdiv(size, tile))](
            lines, weights.float().contiguous(), out, size, K=top_k, BLOCK=tile
        )
    return out


def _product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    where: _Sorted,
    block: int,
    per_row: int,
    kind: str | None,
) -> None:
    """Fill out [entries, N]; ``kind``: the weight holds a gate and what it lets through."""
    outputs = out.shape[1]
    block_n = min(64, padded(outputs, 16))
    block_k = min(64, padded(x.shape[1], 16))
    _experts_kernel[(where.experts.shape[0], triton.cdiv(outputs, block_n))](
        x,
        weight,
        bias,
        out,
        where.entries,
        where.experts,
        x.stride(0),
        out.shape[0],
        weight.shape[0],
        outputs,
        x.shape[1],
        PER_ROW=per_row,
        GATED=kind is not None,
        KIND=kind or "",
        HAS_BIAS=bias is not None,
        BLOCK_M=block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WIDEN=widen(x),
        num_warps=4,
    )
