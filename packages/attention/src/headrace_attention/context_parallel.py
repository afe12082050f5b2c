"""Decode context parallelism: ranks that would keep the same keys and values keep a part of the tokens each.

Where a model has fewer key-value heads than ranks (of MLA there is one vector for all heads), neighbouring
ranks of tensor parallelism hold copies of the same head. D of them can hold 1/D of each sequence's tokens
instead (:class:`KeyShare`), so the same memory caches D times the tokens. A block of a table then stands for
``D * S`` tokens, of which each rank's page has S.

A layer gathers the queries of the D ranks' heads. Each rank attends with all of them to its own keys, and has
an output and the log-sum-exp of its scores for each. ``lse_correction`` weighs the outputs by those; their
sum over the ranks, taken in the order of ranks, is the attention to all keys, of which each rank takes its
heads.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (merging softmaxes of parts); Yang et al. 2024,
arXiv:2411.01783 (context parallelism of inference).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace_attention.counterparts import counterpart
from headrace_attention.metadata import PagedMetadata
from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_core.attention import (
    FEATURE_TEXTS,
    MLA,
    SOFT_CAP,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.ops.optional.key_share import KEY_SHARE
from headrace_core.ops.optional.lse_correction import LSE_CORRECTION

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable
    from headrace_core.parallel import Communicator

FIELD = "parallel.decode_context_parallel_size"
SERVED_FEATURES = frozenset({MLA, SOFT_CAP})
"""Features of layers that do not go by the positions of keys."""


@dataclass(frozen=True, slots=True)
class KeyShare:
    """One rank's tokens of every sequence: token i is rank ``i // interleave % ranks``'s.

    ``ranks * interleave`` divides the tokens of a block.
    """

    rank: int
    ranks: int
    interleave: int = 1

    def count(self, length: int) -> int:
        """Own tokens among the first ``length`` of a sequence."""
        cycle = self.ranks * self.interleave
        rest = length % cycle - self.rank * self.interleave
        return length // cycle * self.interleave + max(0, min(rest, self.interleave))


class _KeySharing:
    """What both backends share: the group of ranks, and their exchanges."""

    def __init__(self, ops: OpTable, group: Communicator, share: KeyShare) -> None:
        super().__init__(ops)  # type: ignore[call-arg] # of a backend, which this is mixed into
        self._group, self._share = group, share
        self._key_share = ops.optional(KEY_SHARE)
        self._corrected = ops.optional(LSE_CORRECTION)

    def prepare(self, batch: ForwardBatch, group: int) -> PagedMetadata:
        """The batch as this rank sees it: slots, and numbers of keys, are its own. See
        :meth:`headrace_core.attention.AttentionBackend.prepare`."""
        where, share = PagedMetadata.of(batch, group), self._share
        slots, seq_lens, key_counts = self._key_share(
            where.cu_seqlens_q,
            where.seq_lens,
            where.slot_mapping,
            rank=share.rank,
            ranks=share.ranks,
            interleave=share.interleave,
        )
        return replace(
            where,
            slot_mapping=slots,
            seq_lens=seq_lens,
            max_seqlen_k=share.count(where.max_seqlen_k),
            key_counts=key_counts,
        )

    def slots(self, batch: ForwardBatch, group: int) -> Tensor:
        """See :meth:`headrace_core.attention.AttentionBackend.slots`."""
        metadata: PagedMetadata = batch.attention[group]
        return metadata.slot_mapping

    def _of_all_heads(
        self, layer: AttentionLayerSpec, query: Tensor, metadata: PagedMetadata | None
    ) -> tuple[AttentionLayerSpec, Tensor]:
        """The layer as it asks this rank's keys with the queries of all ranks, and their log-sum-exp, which
        it will write: [T, D * H]."""
        shape, device = query.shape[:2], query.device
        lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        extras = {**layer.extras, "lse": lse}
        if metadata is not None:
            extras["key_counts"] = metadata.key_counts
        return replace(layer, num_heads=query.shape[1], extras=extras), lse

    def _joined(self, out: Tensor, lse: Tensor) -> Tensor:
        """Partial outputs [T, D * H, ...] of all heads -> whole ones of this rank's [T, H, ...]."""
        lses = self._group.all_gather(lse[None], dim=0)
        shares = self._corrected(out, lses, self._group.rank)
        return self._group.reduce_scatter(shares, dim=0)[0].to(out.dtype)


class SharedPagedBackend(_KeySharing, PagedBackend):
    """``paged`` over one rank's share of the tokens. Layers have one key-value head."""

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
        query = self._group.all_gather(query, dim=1)
        layer, lse = self._of_all_heads(layer, query, metadata)
        out = super().forward(layer, query, key, value, kv_cache, metadata)
        return self._joined(out, lse)


class SharedMLABackend(_KeySharing, MLAOpsBackend):
    """``latent`` over one rank's share of the tokens."""

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
        both = self._group.all_gather(torch.cat((query, rope_query), dim=-1), dim=1)
        cut = query.shape[-1]
        layer, lse = self._of_all_heads(layer, both, metadata)
        out = super().attend(
            layer, both[..., :cut], both[..., cut:], latent, rope_key, kv_cache, metadata,
            topk_indices=topk_indices,
        )  # fmt: skip
        return self._joined(out, lse)


class KeySharingChooser:
    """Gives layers the backend that shares keys over a group's ranks; equal needs get the same object.

    Args:
        group: the ranks that share them.
        interleave: see :class:`KeyShare`.
    """

    def __init__(self, ops: OpTable, group: Communicator, interleave: int) -> None:
        self._ops, self._group = ops, group
        self._share = KeyShare(group.rank, group.world_size, interleave)
        self._made: dict[type[AttentionBackend], AttentionBackend] = {}

    def __call__(self, need: AttentionNeed, chosen: AttentionBackend) -> AttentionBackend:
        """The backend for a layer with this need, in place of the one that was chosen.

        Raises:
            ConfigError: the layer's attention, or the backend, does not work on a share of the keys.
        """
        classes: dict[type[AttentionBackend], type[SharedPagedBackend | SharedMLABackend]] = {
            PagedBackend: SharedPagedBackend,
            MLAOpsBackend: SharedMLABackend,
        }
        shared = counterpart(
            need, chosen, classes,
            unserved=sorted(FEATURE_TEXTS.get(n, n) for n in need.features - SERVED_FEATURES),
            field=FIELD, ranks=self._group.world_size,
        )  # fmt: skip
        if type(chosen) not in self._made:
            self._made[type(chosen)] = shared(self._ops, self._group, self._share)
        return self._made[type(chosen)]
