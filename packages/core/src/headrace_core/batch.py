"""The input of one forward pass: flat tensors, no padding between requests.

Letters: T tokens in this step, B requests in this step, G cache groups, M blocks per table row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where the requests of a batch live in one cache group."""

    block_table: Tensor
    """[B, M] int32; entries past a request's blocks are 0 and never read."""
    slot_mapping: Tensor
    """[T] int64; ``block_id * block_size + offset`` of each new token, -1 = written nowhere.
    In a group of cross-attention layers [E], of each new encoder state."""
    seq_lens: Tensor | None = None
    """[B] int32; of a group of cross-attention layers: number of encoder states."""
    max_seqlen_k: int = 0
    """With ``seq_lens``: the largest."""
    state_in: Tensor | None = None
    """[B] int64; of a group of recurrent layers: the block with each request's state before this
    step, -1 for those that begin with it. Such a group's ``block_table`` and ``slot_mapping`` are
    empty: [B, 0] and [0]."""
    state_out: Tensor | None = None
    """[B] int64; with ``state_in``: the block that takes the state after this step, which may be the
    same one. No block is anybody's ``state_out`` and another request's ``state_in`` or
    ``state_out``; several requests may begin from one state."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input, passed down through the model as an argument.

    Tokens of a request are adjacent; request b owns rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``.
    """

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64; absolute position of each token in its request."""
    cu_seqlens_q: Tensor
    """[B + 1] int32; running sum of new tokens, starts at 0."""
    seq_lens: Tensor
    """[B] int32; context length *including* this step's tokens."""
    max_seqlen_q: int
    max_seqlen_k: int
    groups: tuple[GroupBatch, ...]
    """By cache group; empty while memory is profiled (nothing is cached then)."""
    attention: tuple[Any, ...] = ()
    """By cache group: what the backend's ``prepare`` returned."""
    logits_rows: Tensor | None = None
    """[R] int64; rows of the hidden states whose logits are wanted, None for all."""
    token_type_ids: Tensor | None = None
    """[T] int64; segments of a pair's texts. Always given to models that have such ids."""
    encoder_states: Tensor | None = None
    """[E, H]; what the encoder made of the media of requests that begin in this step."""
    key_lens: Tensor | None = None
    """[B] int32, at least 1; in attention in both directions only so many of a request's first tokens
    are seen. None: all are, as in all steps but those with filled-up queries of late interaction."""
    last_keys: Tensor | None = None
    """[T] int32; last position that each token sees, where some see later ones than their own: see
    :class:`headrace_core.ops.PagedAttentionOp`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Capability-specific inputs (media embeddings, ...), by a name that the capability owns."""

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])
