"""``latent``: multi-head latent attention in its absorbed form, through core's ops.

What is cached of a token is one vector, [N, S, R + P], that all heads read: a step of one token reads
it once, where expanded keys and values would be num_heads times as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_attention.metadata import PagedMetadata
from headrace_core.attention import MLA, SPARSE_TOPK, AttentionLayerSpec, AttentionNeed, MLABackend
from headrace_core.kv import CACHE_DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


class MLAOpsBackend(MLABackend):
    """Latent attention through ``ops.mla_cache_write`` and ``ops.mla_attention``."""

    name: ClassVar[str] = "latent"
    supported_devices = ("cpu", "cuda")
    supported_features = frozenset({MLA, SPARSE_TOPK})
    supported_kv_cache_dtypes = tuple(CACHE_DTYPES)

    @classmethod
    def refuse(cls, need: AttentionNeed) -> list[str]:
        """See :meth:`headrace_core.attention.AttentionBackend.refuse`."""
        reasons = super().refuse(need)
        if need.device == "cuda" and CACHE_DTYPES.get(need.kv_cache_dtype):
            reasons.append(f"kv_cache_dtype {need.kv_cache_dtype} not supported on device cuda")
        return reasons

    def prepare(self, batch: ForwardBatch, group: int) -> PagedMetadata:
        return PagedMetadata.of(batch, group)

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
        if kv_cache is None or metadata is None:
            return torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if (latent is None) != (rope_key is None):
            raise ValueError("latent and rope_key must both be given, or neither")
        if latent is not None and rope_key is not None:
            self.ops.mla_cache_write(
                latent, rope_key, kv_cache, metadata.slot_mapping, k_scale=layer.k_scale
            )
        extras: dict[str, Any] = {**layer.extras}
        return self.ops.mla_attention(
            query,
            rope_query,
            kv_cache,
            metadata.block_table,
            metadata.cu_seqlens_q,
            metadata.seq_lens,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            scale=layer.scale,
            topk_indices=topk_indices,
            k_scale=layer.k_scale,
            **extras,
        )
