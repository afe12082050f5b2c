"""Decode context parallelism: ranks that would keep the same keys and values keep a part of the tokens each.

Where a model has fewer key-value heads than ranks (of MLA there is one vector for all heads), neighbouring
ranks of tensor parallelism hold copies of the same head. D of them can hold 1/D of each sequence's tokens
instead (:class:`KeyShare`), so the same memory caches D times the tokens. A block of a table then stands for
``D * S`` tokens, of which each rank's page has S.

A layer gathers the queries of the D ranks' heads. Each rank attends with all of them to its own keys, and has
an output and the log-sum-exp of its scores for each. :func:`corrected` weighs the outputs by those; their sum
over the ranks, taken in the order of ranks, is the attention to all keys, of which each rank takes its heads.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (merging softmaxes of parts); Yang et al. 2024,
arXiv:2411.01783 (context parallelism of inference).
"""

from __future__ import annotations

import math
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
from headrace_core.kv import PAD_SLOT

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

    def count(self, length: Tensor) -> Tensor:
        """Own tokens among the first ``length`` of a sequence; any shape, integers, at least 0."""
        cycle = self.ranks * self.interleave
        rest = length % cycle - self.rank * self.interleave
        return length // cycle * self.interleave + rest.clamp(0, self.interleave)

    def own_slots(self, slots: Tensor) -> Tensor:
        """Slots in blocks of all ranks' tokens [T] int64 -> in this rank's pages; the other ranks' tokens
        are written nowhere."""
        run = slots // self.interleave
        own = (slots >= 0) & (run % self.ranks == self.rank)
        return torch.where(
            own, run // self.ranks * self.interleave + slots % self.interleave, PAD_SLOT
        )

    def metadata(self, batch: ForwardBatch, group: int) -> PagedMetadata:
        """The batch as this rank sees it: slots, and numbers of keys, are its own."""
        where = PagedMetadata.of(batch, group)
        new = batch.cu_seqlens_q.diff()
        first = (batch.seq_lens - new - batch.cu_seqlens_q[:-1]).repeat_interleave(new)
        length = torch.zeros(batch.input_ids.shape, dtype=torch.int32, device=first.device)
        length[: first.shape[0]] = first + torch.arange(
            1, first.shape[0] + 1, dtype=torch.int32, device=first.device
        )
        return replace(
            where,
            slot_mapping=self.own_slots(where.slot_mapping),
            seq_lens=self.count(where.seq_lens),
            max_seqlen_k=int(self.count(torch.tensor(where.max_seqlen_k))),
            key_counts=self.count(length),
        )


def corrected(out: Tensor, lses: Tensor, rank: int) -> Tensor:
    """A rank's share of attention to the keys of all ranks: their sum is the whole.

    The bits of a row depend on that row alone, wherever it stands in the tensors.

    Args:
        out: [T, H, D], this rank's attention to its own keys; of a row that sees none of them, zeros.
        lses: [N, T, H] float32, natural log-sum-exps of all ranks' scores. -inf, +inf and NaN: no keys.
        rank: this one's place in ``lses``.

    Returns:
        [T, H, D] float32; 0 for rows that no rank has keys for.
    """
    none = torch.tensor(-torch.inf, dtype=torch.float32, device=lses.device)
    lses = torch.where(lses < torch.inf, lses, none)
    top = lses.amax(0)
    weights = _exp(lses - torch.where(top == none, 0.0, top))
    total = weights[0]
    for other in weights[1:]:
        total = total + other
    weight = weights[rank] / torch.where(total == 0.0, 1.0, total)
    return torch.where(weight[..., None] == 0.0, 0.0, out.float() * weight[..., None])


_FACTORS = tuple(math.log(2) ** n / math.factorial(n) for n in range(14, -1, -1))


def _exp(x: Tensor) -> Tensor:
    """e^x of float32 x <= 0, by products and sums alone: torch's exp may give other bits at the end of a
    tensor, where vectors do not fit, than in its middle."""
    y = x.double().clamp(min=-1000.0) * (1 / math.log(2))
    whole = y.floor()
    part = y - whole
    power = torch.full_like(part, _FACTORS[0])
    for factor in _FACTORS[1:]:
        power = power * part + factor
    exponent = (whole.clamp(min=-1022.0).long() + 1023) << 52  # of a double
    return (power * exponent.view(torch.float64)).float()


class _KeySharing:
    """What both backends share: the group of ranks, and their exchanges."""

    def __init__(self, ops: OpTable, group: Communicator, share: KeyShare) -> None:
        super().__init__(ops)  # type: ignore[call-arg] # of a backend, which this is mixed into
        self._group, self._share = group, share

    def prepare(self, batch: ForwardBatch, group: int) -> PagedMetadata:
        """See :meth:`headrace_core.attention.AttentionBackend.prepare`."""
        return self._share.metadata(batch, group)

    def slots(self, batch: ForwardBatch, group: int) -> Tensor:
        """See :meth:`headrace_core.attention.AttentionBackend.slots`."""
        metadata: PagedMetadata = batch.attention[group]
        return metadata.slot_mapping

    def _of_all_heads(
        self, layer: AttentionLayerSpec, query: Tensor, metadata: PagedMetadata | None
    ) -> tuple[AttentionLayerSpec, Tensor]:
        """The layer as it asks this rank's keys with the queries of all ranks, and their log-sum-exp, which
        it will write: [T, D * H]."""
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
        extras = {**layer.extras, "lse": lse}
        if metadata is not None:
            extras["key_counts"] = metadata.key_counts
        return replace(layer, num_heads=query.shape[1], extras=extras), lse

    def _joined(self, out: Tensor, lse: Tensor) -> Tensor:
        """Partial outputs [T, D * H, ...] of all heads -> whole ones of this rank's [T, H, ...]."""
        lses = self._group.all_gather(lse[None], dim=0)
        share = corrected(out, lses, self._group.rank)
        return self._group.reduce_scatter(share, dim=1).to(out.dtype)


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
