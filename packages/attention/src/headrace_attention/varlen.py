"""``varlen``: attention in both directions without a cache, through core's op.

All sequences of a batch go through one call, told apart by their cumulative lengths: nothing is
padded, and nothing is computed for a longer neighbour's sake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_core.attention import SLIDING_WINDOW, SOFT_CAP, AttentionLayerSpec, EncoderBackend

if TYPE_CHECKING:
    from torch import Tensor


class VarlenBackend(EncoderBackend):
    """Attention of encoders through ``ops.varlen_attention``."""

    name: ClassVar[str] = "varlen"
    supported_devices = ("cpu", "cuda")
    supported_features = frozenset({SLIDING_WINDOW, SOFT_CAP})

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.EncoderBackend.attend`."""
        return self.ops.varlen_attention(
            query,
            key,
            value,
            cu_seqlens,
            max_seqlen=max_seqlen,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            distance_bias=distance_bias,
            key_lens=key_lens,
            **layer.extras,
        )
