"""Ops of ranks that keep a part of the keys each (decode context parallelism)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import describe, dtype_code, int32, int64


class KeyShare:
    """See :class:`headrace_core.ops.optional.key_share.KeyShareOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.key_share

    def __call__(
        self,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        slot_mapping: Tensor,
        *,
        rank: int,
        ranks: int,
        interleave: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        requests, tokens = seq_lens.shape[0], slot_mapping.shape[0]
        if cu_seqlens_q.shape[0] != requests + 1 or not 0 <= rank < ranks or interleave < 1:
            raise ConfigError(
                f"key_share: cu_seqlens_q {describe(cu_seqlens_q)} for seq_lens {describe(seq_lens)}, rank "
                f"{rank} of {ranks}, interleave {interleave}"
            )
        cu_seqlens_q, seq_lens = int32(cu_seqlens_q), int32(seq_lens)
        slot_mapping = int64(slot_mapping)
        slots = torch.empty(tokens, dtype=torch.int64)
        lens = torch.empty(requests, dtype=torch.int32)
        counts = torch.empty(tokens, dtype=torch.int32)
        status = self._kernel(
            slots.data_ptr(), lens.data_ptr(), counts.data_ptr(), slot_mapping.data_ptr(),
            cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), tokens, requests, rank, ranks, interleave,
        )  # fmt: skip
        if status:
            raise ConfigError(
                f"key_share: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise within the {tokens} tokens"
            )
        return slots, lens, counts


class LSECorrection:
    """See :class:`headrace_core.ops.optional.lse_correction.LSECorrectionOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.lse_correction

    def __call__(self, out: Tensor, lses: Tensor, rank: int) -> Tensor:
        rows, heads, width = out.shape
        ranks = lses.shape[0]
        fits = (
            lses.shape == (ranks, rows, heads)
            and lses.dtype is torch.float32
            and heads % ranks == 0
        )
        if not fits or not 0 <= rank < ranks:
            raise ConfigError(
                f"lse_correction: out is {describe(out)}, lses {describe(lses)}, rank {rank}: lses must be "
                f"float32 [N, {rows}, {heads}], the rank one of the N, which divides the heads"
            )
        out, lses = out.contiguous(), lses.contiguous()
        share = torch.empty(ranks, rows, heads // ranks, width, dtype=torch.float32)
        self._kernel(
            share.data_ptr(), out.data_ptr(), lses.data_ptr(), rows, heads, width, ranks, rank,
            dtype_code(out.dtype),
        )  # fmt: skip
        return share
