"""``key_share``: one rank's part of each sequence's tokens (decode context parallelism)."""

from __future__ import annotations

import torch
from torch import Tensor


def key_share(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    rank: int,
    ranks: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`headrace_core.ops.optional.key_share.KeyShareOp`."""

    def count(length: Tensor) -> Tensor:
        """Own tokens among the first so many of a sequence."""
        cycle = ranks * interleave
        rest = length % cycle - rank * interleave
        return length // cycle * interleave + rest.clamp(0, interleave)

    new = cu_seqlens_q.diff()
    first = (seq_lens - new - cu_seqlens_q[:-1]).repeat_interleave(new)
    length = torch.zeros(slot_mapping.shape, dtype=torch.int32, device=slot_mapping.device)
    length[: first.shape[0]] = first + torch.arange(
        1, first.shape[0] + 1, dtype=torch.int32, device=first.device
    )
    run = slot_mapping // interleave
    slots = torch.where(
        (slot_mapping >= 0) & (run % ranks == rank),
        run // ranks * interleave + slot_mapping % interleave,
        -1,
    )
    return slots, count(seq_lens), count(length)


def fake_key_share(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    rank: int,
    ranks: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.empty(slot_mapping.shape, dtype=torch.int32, device=slot_mapping.device)
    return torch.empty_like(slot_mapping), torch.empty_like(seq_lens), counts
