"""What adapters of low rank add to a linear layer's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_kernels.cpu.library import BAD_LENGTHS, Library
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.ops.arguments import dtype_code, matrix
from headrace_kernels.low_rank import AdaptedLayer

RANK_STEP, INPUT_STEP = 16, 32
"""Steps of ranks and inputs in which ``down`` is held, those of native/src/low_rank_tiles.h."""
UP_STEP, UP_PANEL = 8, 64
"""Steps of ranks and outputs in which ``up`` is held."""


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """The adapters of one layer, as native/src/low_rank.h reads them."""

    layer: AdaptedLayer
    down: Tensor
    """[S, P, ranks, inputs], both in whole steps; zeros behind the last."""
    up: Tensor
    """[S, panels of all parts, ranks * UP_PANEL]; a part's panels are [ranks / pair, UP_PANEL, pair] each,
    one after the other from the part's first on, ranks in whole steps; zeros behind the last."""
    ranks: Tensor
    """[S, P] int32; 0: empty."""
    scales: Tensor
    """[S, P] float32."""
    widths: Tensor
    """[P] int64: the parts' outputs."""
    addresses: tuple[int, ...]
    """Of these tensors, in this order."""
    pair: int
    """Ranks that lie side by side: 2 where tiles multiply pairs."""

    @property
    def num_bytes(self) -> int:
        return (self.down.numel() + self.up.numel()) * self.down.element_size()

    def panels(self, slot: int, part: int, rank: int) -> Tensor:
        """Where a part's up of this rank lies: [panels, UP_PANEL, ranks / pair, pair]."""
        parts, ranks = self.layer.parts, _whole(rank, UP_STEP)
        first, count = sum(map(_panels, parts[:part])), _panels(parts[part])
        room = self.up[slot, first : first + count].view(-1)[: count * ranks * UP_PANEL]
        return room.view(count, ranks // self.pair, UP_PANEL, self.pair).transpose(1, 2)


class LowRank:
    """See :class:`headrace_core.ops.optional.low_rank.LowRankOp`.

    Raises:
        IndexError: a row's slot does not exist.
        ValueError: shapes or dtypes are not the layer's.
    """

    def __init__(self, library: Library) -> None:
        self._kernel, self._tiles = library.low_rank, library.isa == "avx512_amx"

    def allocate(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_parts: Sequence[int],
        like: Tensor,
    ) -> LowRankFactors:
        dtype_code(like.dtype)
        parts, places = tuple(out_parts), (num_slots, len(out_parts))
        ranks, inputs = _whole(max_rank, RANK_STEP), _whole(in_features, INPUT_STEP)
        tensors = (
            _memory(like, *places, ranks, inputs),
            _memory(
                like, num_slots, sum(map(_panels, parts)), _whole(max_rank, UP_STEP) * UP_PANEL
            ),
            torch.zeros(places, dtype=torch.int32),
            torch.zeros(places, dtype=torch.float32),
            torch.tensor(parts, dtype=torch.int64),
        )
        layer = AdaptedLayer(num_slots, max_rank, in_features, parts, sum(parts), like.dtype)
        pair = 2 if self._tiles and like.dtype is torch.bfloat16 else 1
        return LowRankFactors(layer, *tensors, tuple(each.data_ptr() for each in tensors), pair)

    def write(
        self, factors: LowRankFactors, slot: int, part: int, down: Tensor, up: Tensor, scale: float
    ) -> None:
        factors.layer.check_place(slot, part)
        rank = factors.layer.rank_of(part, down, up)
        lines = factors.down[slot, part, : _whole(rank, RANK_STEP)].zero_()
        lines[:rank, : factors.layer.inputs] = down
        panels = factors.panels(slot, part, rank)
        whole = up.new_zeros(panels.shape[0] * UP_PANEL, _whole(rank, UP_STEP))
        whole[: up.shape[0], :rank] = up
        panels.copy_(whole.view(panels.shape))
        factors.ranks[slot, part], factors.scales[slot, part] = rank, scale

    def __call__(self, out: Tensor, x: Tensor, factors: LowRankFactors, slots: Tensor) -> Tensor:
        layer = factors.layer
        layer.check_rows(out, x, slots)
        x, rows, stride = matrix(x)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), *factors.addresses, slots.data_ptr(), rows, slots.shape[0],
            layer.num_slots, len(layer.parts), layer.max_rank, layer.inputs, out.stride(0), stride,
            dtype_code(layer.dtype),
        )  # fmt: skip
        if status == BAD_LENGTHS:  # seen by the kernel: a recording has more rows than any step
            raise layer.too_few(slots, rows)
        if status:
            raise IndexError(f"low_rank: a row's slot is outside [-1, {layer.num_slots})")
        return out


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


def _panels(outputs: int) -> int:
    return -(-outputs // UP_PANEL)


def _memory(like: Tensor, *shape: int) -> Tensor:
    """Unset memory, in large pages."""
    count = torch.Size(shape).numel()
    return packed_buffer(count * like.element_size()).view(like.dtype).view(shape)
