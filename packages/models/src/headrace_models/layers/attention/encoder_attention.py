"""Self-attention in both directions, without a cache.

Letters: T tokens, Hq query heads, Hk key-value heads, D head size, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_core.attention import AttentionNeed
from headrace_models.layers.attention.self_attention import ProjectedAttention, SelfAttention

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.distance_bias import DistanceBias


class EncoderAttention(ProjectedAttention, SelfAttention):
    """Projections, rotation and attention of one layer. A sequence's tokens see each other, in any
    order, and no other sequence's: all of a prompt must be in the step.

    Other arguments: :class:`~headrace_models.layers.attention.self_attention.ProjectedAttention`.

    Args:
        distance_bias: added to the scores; may be shared by layers.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        distance_bias: DistanceBias | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(context, name, attention_type="encoder_only", **arguments)
        # In a tuple: what is shared is another layer's piece, and loaded there.
        self.shared_bias = () if distance_bias is None else (distance_bias,)
        self.backend = context.encoder_attention(
            AttentionNeed(
                head_dim=self.head_dim,
                dtype=context.dtype,
                kv_cache_dtype="auto",
                block_size=context.block_size,
                device=context.device,
                attention_type="encoder_only",
                features=self.features,
            )
        )

    def __call__(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """x [T, hidden_size] -> the same shape, or with rows [R] int64 only those of it."""
        query, key, value = self.project(x)
        if not self.norm_after_rotary:
            query, key = self.normed(query, key)
        if self.rotary is not None:
            positions, interleaved = batch.positions, self.interleaved
            self.ops.rotary(query, key, positions, self.rotary, interleaved=interleaved)
        if self.norm_after_rotary:
            query, key = self.normed(query, key)
        out = self.backend.attend(
            self.spec,
            query,
            key,
            value,
            batch.cu_seqlens_q,
            batch.max_seqlen_q,
            distance_bias=self.shared_bias[0].bias if self.shared_bias else None,
            key_lens=batch.key_lens,
        )
        out = out.flatten(1)
        return self.out(out if rows is None else self.ops.embedding(rows, out))
