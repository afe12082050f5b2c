"""Facts about a batch that a backend needs before any layer runs."""

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
    """[T] int64, negative = written nowhere; of cross-attention [E], of new encoder states."""
    cu_seqlens_q: Tensor
    """[B + 1] int32."""
    seq_lens: Tensor
    """[B] int32: how many keys a request has, this step's included."""
    max_seqlen_q: int
    max_seqlen_k: int
    last_keys: Tensor | None = None
    """See :class:`~headrace_core.batch.ForwardBatch`."""
    key_counts: Tensor | None = None
    """[T] int32; how many of its request's keys here each token sees, on a rank that keeps some of them
    (:mod:`headrace_attention.context_parallel`)."""

    @classmethod
    def of(cls, batch: ForwardBatch, group: int) -> PagedMetadata:
        """Metadata for ``batch.groups[group]``: a group of cross-attention has lengths of its own."""
        where = batch.groups[group]
        seq_lens, max_seqlen_k = batch.seq_lens, batch.max_seqlen_k
        if where.seq_lens is not None:
            seq_lens, max_seqlen_k = where.seq_lens, where.max_seqlen_k
        return cls(
            block_table=where.block_table,
            slot_mapping=where.slot_mapping,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            last_keys=batch.last_keys,
        )
