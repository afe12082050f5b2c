"""What a backend must know of a batch before any layer runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """One cache group's view of a batch. Holds references to the batch's tensors, copies nothing.

    Letters: T tokens, B requests, M blocks per table row.
    """

    block_table: Tensor
    """[B, M] int32."""
    slot_mapping: Tensor
    """[T] int64, negative = written nowhere."""
    cu_seqlens_q: Tensor
    """[B + 1] int32."""
    seq_lens: Tensor
    """[B] int32, including this step's tokens."""
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, batch: ForwardBatch, group: int) -> PagedMetadata:
        """Metadata for ``batch.groups[group]``."""
        where = batch.groups[group]
        return cls(
            block_table=where.block_table,
            slot_mapping=where.slot_mapping,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
        )
