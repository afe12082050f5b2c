"""Prefill context parallelism: ranks with the same weights compute a part of a prompt's tokens each.

Every rank has the whole model (or the same share of it, with tensor parallelism within) and a whole cache.
:class:`DividedPass` stands in the place of a model's ``forward``: of a step with a long prompt each rank runs
the model on its own tokens (:mod:`~headrace_attention.prompt_division`), as a batch whose sequences are
pieces of prompts. In each layer a rank writes the keys and values of its tokens and gets the cache blocks
that the others have written; then its tokens attend to the whole cache up to their own position, as in any
step. At the end ranks exchange the hidden states that are wanted. Other steps run on every rank alike.

Nothing is added up in another order: with kernels whose rows do not depend on the batch, hidden states are
the same bits as of one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_attention.counterparts import counterpart
from headrace_attention.metadata import PagedMetadata
from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_attention.prompt_division import LEAST_TOKENS, NewTokens, Piece, PromptDivision
from headrace_attention.writing import store
from headrace_core.attention import (
    FEATURE_TEXTS,
    SPARSE_TOPK,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.batch import GroupBatch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable
    from headrace_core.parallel import Communicator

FIELD = "parallel.prefill_context_parallel_size"


class BlockExchange:
    """The cache blocks that ranks have written in a step, in one cache group.

    Args:
        group: the ranks.
        blocks: by rank: [P] int64, each block on one rank only.
    """

    def __init__(self, group: Communicator, blocks: Sequence[Tensor]) -> None:
        self._group, self._blocks = group, tuple(blocks)
        most = max(len(own) for own in blocks)
        own = blocks[group.rank]
        # Ranks send equally many; what fills up is block 0, which nobody reads.
        self._sent = torch.cat((own, own.new_zeros(most - len(own))))

    def complete(self, pages: Tensor) -> None:
        """Write the other ranks' blocks to ``pages`` [N, ...], whatever a block has."""
        if not len(self._sent):
            return
        sent = pages.index_select(0, self._sent)
        as_bytes = sent.view(len(sent), -1).view(torch.uint8)
        gathered = self._group.all_gather(as_bytes, dim=0).view(
            self._group.world_size, *as_bytes.shape
        )
        for rank, blocks in enumerate(self._blocks):
            if rank != self._group.rank and len(blocks):
                theirs = gathered[rank, : len(blocks)].view(sent.dtype)
                pages.index_copy_(0, blocks, theirs.view(len(blocks), *sent.shape[1:]))


@dataclass(frozen=True, slots=True)
class DividedMetadata(PagedMetadata):
    """One cache group's view of a rank's part of a batch: its requests are pieces of prompts."""

    exchange: BlockExchange | None = None


def _complete(
    backend: AttentionBackend,
    layer: AttentionLayerSpec,
    kv_cache: Tensor,
    metadata: DividedMetadata,
) -> None:
    """Get what the other ranks have written for a layer."""
    if metadata.exchange is None or layer.kv_sharing_target is not None:
        return  # the layer whose cache it reads has got it
    metadata.exchange.complete(kv_cache.permute(backend.cache_stride_order()))
    for scales in (layer.k_scale, layer.v_scale):
        if scales is not None and scales.dim() > 1:  # in the cache, beside their rows
            metadata.exchange.complete(scales)


class DividedPagedBackend(PagedBackend):
    """``paged``, in steps that ranks divide."""

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: PagedMetadata | None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.AttentionBackend.forward`."""
        if isinstance(metadata, DividedMetadata) and kv_cache is not None:
            store(self.ops, layer, key, value, self.views(kv_cache), metadata.slot_mapping)
            _complete(self, layer, kv_cache, metadata)
            key = value = None
        return super().forward(layer, query, key, value, kv_cache, metadata)


class DividedMLABackend(MLAOpsBackend):
    """``latent``, likewise."""

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        rope_query: Tensor,
        latent: Tensor | None,
        rope_key: Tensor | None,
        kv_cache: Tensor | None,
        metadata: PagedMetadata | None,
        *,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.MLABackend.attend`."""
        if isinstance(metadata, DividedMetadata) and kv_cache is not None:
            if latent is not None and rope_key is not None:
                self.ops.mla_cache_write(
                    latent, rope_key, kv_cache, metadata.slot_mapping, k_scale=layer.k_scale
                )
            _complete(self, layer, kv_cache, metadata)
            latent = rope_key = None
        return super().attend(
            layer,
            query,
            rope_query,
            latent,
            rope_key,
            kv_cache,
            metadata,
            topk_indices=topk_indices,
        )


class DividedPass:
    """A model's pass, of which each rank computes its own tokens where that is worth it.

    Args:
        join: gives the group of ranks with equal weights, in the order of their pieces.
        ranks: their number.
        block_size: tokens of a cache block.
        least_tokens: see :class:`~headrace_attention.prompt_division.PromptDivision`.
    """

    def __init__(
        self,
        join: Callable[[], Communicator],
        ranks: int,
        block_size: int,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self._join = join
        self.num_divided = 0
        """Passes until now of which each rank computed a part."""
        self._division = PromptDivision(ranks, block_size, least_tokens)

    @property
    def _group(self) -> Communicator:
        return self._join()

    def join(self) -> None:
        """Join the group, which other ranks do at the same time. Idempotent."""
        self._join()

    def divides(self, batch: ForwardBatch) -> bool:
        """True if each rank computes a part of the batch, the same on all of them."""
        return self._pieces(batch) is not None

    def run(self, forward: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> Tensor:
        """Hidden states as ``forward`` gives them [R, H], on every rank."""
        pieces = self._pieces(batch)
        if pieces is None:
            return forward(batch)
        self.num_divided += 1
        rows = [_rows(own, batch) for own in pieces]
        wanted = _wanted(rows, batch)
        rank, most = self._group.rank, max(len(own) for own in wanted)
        own_rows = (
            wanted[rank] if len(wanted[rank]) else rows[rank][:1]
        )  # a pass gives a row at least
        own = self._own_batch(batch, pieces, rows, torch.searchsorted(rows[rank], own_rows))
        states = forward(own)
        padded = states.new_zeros((most, states.shape[1]))
        padded[: len(wanted[rank])] = states[: len(wanted[rank])]
        return self._group.all_gather(padded, dim=0).index_select(0, _order(wanted, batch))

    def _pieces(self, batch: ForwardBatch) -> list[list[Piece]] | None:
        if batch.max_seqlen_q < self._division.least_tokens or not _has_tokens_only(batch):
            return None
        counts = batch.cu_seqlens_q.diff()
        firsts = (batch.seq_lens - counts).tolist()
        return self._division.pieces([*map(NewTokens, firsts, counts.tolist())])

    def _own_batch(
        self,
        batch: ForwardBatch,
        pieces: Sequence[Sequence[Piece]],
        rows: Sequence[Tensor],
        logits_rows: Tensor,
    ) -> ForwardBatch:
        """This rank's part: pieces are its sequences, whose context ends with their last token."""
        own, at = pieces[self._group.rank], rows[self._group.rank]
        requests = torch.tensor([piece.request for piece in own])
        lengths = [piece.end - piece.start for piece in own]
        firsts = batch.seq_lens - batch.cu_seqlens_q.diff()
        ends = firsts[requests] + torch.tensor([piece.end for piece in own], dtype=torch.int32)
        groups = tuple(
            GroupBatch(where.block_table[requests], where.slot_mapping[at])
            for where in batch.groups
        )
        made = dataclasses.replace(
            batch,
            input_ids=batch.input_ids[at],
            positions=batch.positions[at],
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            seq_lens=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_k=int(ends.max()),
            groups=groups,
            attention=(),
            logits_rows=logits_rows,
        )
        attention = tuple(
            self._metadata(made, index, self._exchange(where.slot_mapping, rows))
            for index, where in enumerate(batch.groups)
        )
        return dataclasses.replace(made, attention=attention)

    def _metadata(self, own: ForwardBatch, group: int, exchange: BlockExchange) -> DividedMetadata:
        plain = PagedMetadata.of(own, group)
        fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
        return DividedMetadata(**fields, exchange=exchange)

    def _exchange(self, slots: Tensor, rows: Sequence[Tensor]) -> BlockExchange:
        """slots [T] of the whole batch -> the blocks that each rank writes; block 0 takes what nobody
        reads."""
        size = self._division.block_size
        written = (torch.unique(slots[own].clamp(min=0) // size) for own in rows)
        return BlockExchange(self._group, [blocks[blocks > 0] for blocks in written])


def _has_tokens_only(batch: ForwardBatch) -> bool:
    """True if the batch has nothing beside tokens and their places that would have to be divided."""
    others = (batch.token_type_ids, batch.encoder_states, batch.key_lens, batch.last_keys)
    return not batch.extra and all(other is None for other in others)


def _rows(pieces: Sequence[Piece], batch: ForwardBatch) -> Tensor:
    """[T of the rank] int64: rows of the batch, ascending."""
    starts = batch.cu_seqlens_q.tolist()
    return torch.cat(
        [
            torch.arange(starts[piece.request] + piece.start, starts[piece.request] + piece.end)
            for piece in pieces
        ]
    )


def _wanted(rows: Sequence[Tensor], batch: ForwardBatch) -> list[Tensor]:
    """By rank: those of its rows whose hidden states are wanted, ascending."""
    if batch.logits_rows is None:
        return list(rows)
    return [own[torch.isin(own, batch.logits_rows)] for own in rows]


def _order(wanted: Sequence[Tensor], batch: ForwardBatch) -> Tensor:
    """[R] int64: where each wanted row is in what is gathered, of which each rank has equally many."""
    most = max(len(own) for own in wanted)
    place = torch.empty(batch.num_tokens, dtype=torch.int64)
    for rank, own in enumerate(wanted):
        place[own] = torch.arange(rank * most, rank * most + len(own))
    return place if batch.logits_rows is None else place[batch.logits_rows]


class DividingChooser:
    """Gives layers the backend that completes the cache in divided steps; equal ones get the same object."""

    def __init__(self, ops: OpTable, ranks: int) -> None:
        self._ops, self._ranks = ops, ranks
        self._made: dict[type[AttentionBackend], AttentionBackend] = {}

    def __call__(self, need: AttentionNeed, chosen: AttentionBackend) -> AttentionBackend:
        """The backend for a layer with this need, in place of the one that was chosen.

        Raises:
            ConfigError: the layer's attention, or the backend, does not work where prompts are divided.
        """
        sparse = SPARSE_TOPK in need.features
        classes: dict[type[AttentionBackend], type[DividedPagedBackend | DividedMLABackend]] = {
            PagedBackend: DividedPagedBackend,
            MLAOpsBackend: DividedMLABackend,
        }
        made = counterpart(
            need, chosen, classes,
            unserved=[f"{FEATURE_TEXTS[SPARSE_TOPK]} attention"] if sparse else [],
            field=FIELD, ranks=self._ranks,
        )  # fmt: skip
        if type(chosen) not in self._made:
            self._made[type(chosen)] = made(self._ops)
        return self._made[type(chosen)]
