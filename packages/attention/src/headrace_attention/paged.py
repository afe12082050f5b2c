"""``paged``: the portable backend. Writes and reads the cache through core's ops.

The work is done by whatever kernels were bound at assembly (Triton on a GPU, native code on a CPU,
the plain-torch reference anywhere), so this backend serves all that ``ops.paged_attention`` is
defined for: every dtype, prefill, decode and mixed batches, sliding windows, chunks, ALiBi, soft caps,
sinks and prefixes, and cross-attention to an encoder's states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_attention.metadata import PagedMetadata
from headrace_attention.writing import store
from headrace_core.attention import (
    ALIBI,
    ALIBI_SQRT,
    CHUNKS,
    FEATURE_TEXTS,
    KV_PREFIX,
    LAST_KEYS,
    LOGIT_SCALE,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
    KVViews,
)
from headrace_core.kv import CACHE_DTYPES
from headrace_core.ops.vnni import can_pack_vnni, vnni_packed

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


class PagedBackend(AttentionBackend):
    """Paged attention through ``ops.cache_write`` and ``ops.paged_attention``."""

    name: ClassVar[str] = "paged"
    supported_devices = ("cpu", "cuda")
    supported_attention_types = ("decoder", "encoder_decoder")
    supported_features = frozenset(
        {
            SLIDING_WINDOW,
            CHUNKS,
            SOFT_CAP,
            SINKS,
            ALIBI,
            ALIBI_SQRT,
            KV_PREFIX,
            LOGIT_SCALE,
            LAST_KEYS,
        }
    )
    supported_kv_cache_dtypes = tuple(CACHE_DTYPES)

    @classmethod
    def refuse(cls, need: AttentionNeed) -> list[str]:
        """See :meth:`headrace_core.attention.AttentionBackend.refuse`."""
        reasons = super().refuse(need)
        if need.device == "cuda" and CACHE_DTYPES.get(need.kv_cache_dtype):
            reasons.append(f"kv_cache_dtype {need.kv_cache_dtype} not supported on device cuda")
        if need.device == "cuda" and LOGIT_SCALE in need.features:
            reasons.append(f"{FEATURE_TEXTS[LOGIT_SCALE]} not supported on device cuda")
        return reasons

    def cache_stride_order(self) -> tuple[int, ...]:
        """Logical (2, N, S, Hk, D) is stored as (N, 2, Hk, S, D).

        A block is one contiguous piece of memory, so copying or sending it is one transfer; and in
        it, the S tokens of one kv head are contiguous, which is what an attention kernel reads
        while it works on that head. Ops take any strides, so the order is a matter of speed only.
        """
        return (1, 0, 3, 2, 4)

    def views(self, kv_cache: Tensor) -> KVViews:
        """Paired (:mod:`headrace_core.ops.vnni`) where the ops are faster with that, else plain."""
        plain = super().views(kv_cache)
        return vnni_packed(plain) if self.ops.vnni_packed and can_pack_vnni(plain) else plain

    def prepare(self, batch: ForwardBatch, group: int) -> PagedMetadata:
        return PagedMetadata.of(batch, group)

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
        if kv_cache is None or metadata is None:
            return torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        caches = self.views(kv_cache)
        store(self.ops, layer, key, value, caches, metadata.slot_mapping)
        window = layer.sliding_window
        extras = dict(layer.extras)
        if metadata.last_keys is not None:  # layers that see nothing later say so in theirs
            extras.setdefault(LAST_KEYS, metadata.last_keys)
        return self.ops.paged_attention(
            query,
            caches.key_cache,
            caches.value_cache,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            scale=layer.scale,
            # None and <= 0 both mean "unlimited" (ATTN-REF 3); ops know only None.
            sliding_window=window if window is not None and window > 0 else None,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            causal=layer.attention_type != "encoder_decoder",
            **extras,
        )
