"""What adapters of low rank add to a linear layer's result, for any mix of adapters.

A program takes a tile of neighbouring rows, and one after the other the slots that rows of it chose: a
step's rows come request by request, so few tiles meet more than one. Nothing is sorted, and the host reads
nothing. The first kernel writes ``y = scale * down @ x`` in float32, in pieces of the inputs, as a few rows
and a small rank fill no GPU otherwise; the second adds the pieces up in order, and ``up @ y`` to the result.

A row's sums run in tiles of one size; with ``batch_invariant`` so do the pieces and the rows of a tile, and a
row's bits then do not depend on the others. Rows whose slot does not exist are left as they are.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kernels.low_rank import AdaptedLayer
from headrace_kernels.triton.launch import dense, padded, widen

_FEW, _MANY = 16, 64
"""Rows of a tile, by how many a step has."""
_OUTPUTS = 64
"""Outputs of a tile."""
_PIECE = 1024
"""Inputs of a piece, whole tiles."""


@triton.jit
def _next_slot(chosen, slot, num_slots):
    """The least of those chosen that is above ``slot``; ``num_slots`` or more if there is none."""
    return tl.min(tl.where(chosen > slot, chosen, num_slots), axis=0)


@triton.jit
def _low_rank_down_kernel(
    x_ptr, down_ptr, ranks_ptr, scales_ptr, slots_ptr, y_ptr, x_stride, num_rows, num_slots, num_parts,
    max_rank, K, piece_size, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """y[piece, row, part, r]: scale times line r of the row's adapter times the piece of its inputs."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks = tl.cdiv(max_rank, BLOCK_R)
    part, first = tl.program_id(1) // blocks, tl.program_id(1) % blocks * BLOCK_R
    r = first + tl.arange(0, BLOCK_R)
    piece = tl.program_id(2)
    chosen = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    slot = _next_slot(chosen, -1, num_slots)
    while slot < num_slots:
        place = slot * num_parts + part
        rank = tl.load(ranks_ptr + place)
        if first < rank:
            mine, r_ok = chosen == slot, r < rank
            lines = down_ptr + (place.to(tl.int64) * max_rank + r)[None, :] * K
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in range(0, piece_size, BLOCK_K):
                k = piece * piece_size + start + tl.arange(0, BLOCK_K)
                x = tl.load(
                    x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :],
                    mask=mine[:, None] & (k < K)[None, :],
                    other=0.0,
                )
                down = tl.load(lines + k[:, None], mask=r_ok[None, :] & (k < K)[:, None], other=0.0)
                if WIDEN:  # see launch.widen
                    x, down = x.to(tl.float32), down.to(tl.float32)
                acc += tl.dot(x, down, input_precision="ieee")
            line = (piece.to(tl.int64) * num_rows + row) * num_parts + part
            tl.store(
                y_ptr + line[:, None] * max_rank + r[None, :],
                acc * tl.load(scales_ptr + place),
                mask=mine[:, None] & r_ok[None, :],
            )
        slot = _next_slot(chosen, slot, num_slots)


@triton.jit
def _low_rank_up_kernel(
    out_ptr, y_ptr, up_ptr, ranks_ptr, slots_ptr, tiles_ptr, out_stride, num_rows, num_slots, num_parts,
    max_rank, N, pieces, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row, n] += row n of the adapter's up times the row's y, of the part that n is of."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tiles_ptr + tl.program_id(1) * 3
    part, end = tl.load(tile), tl.load(tile + 2)
    col = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
    chosen = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    slot = _next_slot(chosen, -1, num_slots)
    while slot < num_slots:
        rank = tl.load(ranks_ptr + slot * num_parts + part)
        if rank > 0:
            ok = (chosen == slot)[:, None] & (col < end)[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, rank, BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                y_ok = (chosen == slot)[:, None] & (r < rank)[None, :]
                y = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for piece in range(pieces):
                    line = (row + piece * num_rows).to(tl.int64) * num_parts + part
                    y += tl.load(
                        y_ptr + line[:, None] * max_rank + r[None, :], mask=y_ok, other=0.0
                    )
                up = tl.load(
                    up_ptr + (slot.to(tl.int64) * N + col)[None, :] * max_rank + r[:, None],
                    mask=(r < rank)[:, None] & (col < end)[None, :],
                    other=0.0,
                )
                acc += tl.dot(y, up.to(tl.float32), input_precision="ieee")
            where = out_ptr + row.to(tl.int64)[:, None] * out_stride + col[None, :]
            total = tl.load(where, mask=ok, other=0.0).to(tl.float32) + acc
            tl.store(where, total.to(out_ptr.dtype.element_ty), mask=ok)
        slot = _next_slot(chosen, slot, num_slots)


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """The adapters of one layer. Beyond a part's rank nothing is read."""

    layer: AdaptedLayer
    down: Tensor
    """[S, P, max_rank, K]."""
    up: Tensor
    """[S, N, max_rank], the parts' rows behind each other."""
    ranks: Tensor
    """[S, P] int32; 0: empty."""
    scales: Tensor
    """[S, P] float32."""
    tiles: Tensor
    """[tiles of N, 3] int32: of each its part, its first output, and where the part ends."""

    @property
    def num_bytes(self) -> int:
        return (self.down.numel() + self.up.numel()) * self.down.element_size()


class LowRank:
    """See :class:`headrace_core.ops.optional.low_rank.LowRankOp`.

    Args:
        batch_invariant: tiles of one size for all batches.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant

    def allocate(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_parts: Sequence[int],
        like: Tensor,
    ) -> LowRankFactors:
        parts, outputs, device = tuple(out_parts), sum(out_parts), like.device
        places = num_slots, len(parts)
        return LowRankFactors(
            AdaptedLayer(num_slots, max_rank, in_features, parts, outputs, like.dtype),
            like.new_empty(*places, max_rank, in_features),
            like.new_empty(num_slots, outputs, max_rank),
            torch.zeros(places, dtype=torch.int32, device=device),
            torch.zeros(places, dtype=torch.float32, device=device),
            torch.tensor(list(_tiles(parts)), dtype=torch.int32, device=device),
        )

    def write(
        self, factors: LowRankFactors, slot: int, part: int, down: Tensor, up: Tensor, scale: float
    ) -> None:
        layer = factors.layer
        layer.check_place(slot, part)
        rank, first = layer.rank_of(part, down, up), sum(layer.parts[:part])
        factors.down[slot, part, :rank] = down
        factors.up[slot, first : first + layer.parts[part], :rank] = up
        factors.ranks[slot, part], factors.scales[slot, part] = rank, scale

    def __call__(self, out: Tensor, x: Tensor, factors: LowRankFactors, slots: Tensor) -> Tensor:
        layer, x = factors.layer, dense(x)
        layer.check_rows(out, x, slots)
        rows, parts, max_rank = x.shape[0], len(layer.parts), layer.max_rank
        if slots.shape[0] < rows:
            raise layer.too_few(slots, rows)
        if not rows:
            return out
        many = rows > _FEW * _FEW and not self.batch_invariant
        size = layer.inputs if many else min(layer.inputs, _PIECE)
        pieces = triton.cdiv(layer.inputs, size)
        y = torch.empty((pieces, rows, parts, max_rank), dtype=torch.float32, device=x.device)
        block_m, block_r = _MANY if many else _FEW, min(64, padded(max_rank, 16))
        tiles, sizes = triton.cdiv(rows, block_m), (rows, layer.num_slots, parts, max_rank)
        _low_rank_down_kernel[tiles, parts * triton.cdiv(max_rank, block_r), pieces](
            x, factors.down, factors.ranks, factors.scales, slots, y, x.stride(0), *sizes,
            layer.inputs, size, BLOCK_M=block_m, BLOCK_R=block_r,
            BLOCK_K=min(64, padded(layer.inputs, 16)), WIDEN=widen(x), num_warps=4,
        )  # fmt: skip
        _low_rank_up_kernel[tiles, factors.tiles.shape[0]](
            out, y, factors.up, factors.ranks, slots, factors.tiles, out.stride(0), *sizes,
            layer.outputs, pieces, BLOCK_M=block_m, BLOCK_R=min(block_r, 32), BLOCK_N=_OUTPUTS,
            num_warps=4,
        )  # fmt: skip
        return out


def _tiles(parts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(part, first output, end of the part) of each tile of outputs, none of which has two parts."""
    first = 0
    for part, width in enumerate(parts):
        for begin in range(first, first + width, _OUTPUTS):
            yield part, begin, first + width
        first += width
