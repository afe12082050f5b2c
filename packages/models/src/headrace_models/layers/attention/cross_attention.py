"""Attention of a decoder to what an encoder made of media: keys and values are written once.

Letters: T tokens, E encoder states, Hq query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace_core.attention import AttentionLayerSpec, AttentionNeed
from headrace_core.kv import CACHE_DTYPES, CrossAttentionSpec, KVCacheSpec
from headrace_models.layers.base import Layer
from headrace_models.layers.linear import column_parallel, row_parallel, shard_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_TYPE = "encoder_decoder"


class CrossAttention(Layer):
    """Projections, cache and attention of one layer: core's ``AttentionLayer``.

    Args:
        name: of the attention module, as the checkpoint spells it; below it are ``q_proj``,
            ``k_proj`` (without a bias), ``v_proj`` and ``out_proj``.
        max_states: most encoder states of a request.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        max_states: int,
    ) -> None:
        self.head_dim = head_dim
        size = num_heads * head_dim
        self.query = column_parallel(
            context, f"{name}.q_proj", hidden_size, (size,), units=(num_heads,), bias=True
        )
        self.key_value = column_parallel(
            context,
            f"{name}.kv_proj",
            hidden_size,
            (size, size),
            units=(num_heads, num_heads),
            bias=True,
            unbiased=(0,),
            part_names=(f"{name}.k_proj", f"{name}.v_proj"),
        )
        self.key_value.no_adapters = "cross-attention makes keys and values of media, not of tokens"
        self.out = row_parallel(context, f"{name}.out_proj", size, hidden_size, bias=True)
        heads = num_heads // shard_of(num_heads, context.communicator, what=f"{name}, heads").count
        self.spec = AttentionLayerSpec(
            name, heads, heads, head_dim, head_dim**-0.5, attention_type=_TYPE
        )
        dtype = CACHE_DTYPES.get(context.kv_cache_dtype) or context.dtype
        self.kv_spec: KVCacheSpec | None = CrossAttentionSpec(
            context.block_size, heads, head_dim, dtype, max_encoder_tokens=max_states
        )
        self.backend = context.attention(
            AttentionNeed(
                head_dim=head_dim,
                dtype=context.dtype,
                kv_cache_dtype=context.kv_cache_dtype,
                block_size=context.block_size,
                device=context.device,
                attention_type=_TYPE,
            )
        )
        self.group = 0
        self.kv_cache: Tensor | None = None
        self.watch: Callable[[Tensor, Tensor], None] | None = None
        """Shown query [T, Hq, D] and key [E, Hq, D] of each call that comes with states."""

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape; states that come with the batch are written first."""
        query = self.query(x).view(x.shape[0], -1, self.head_dim)
        key, value = self.keys_and_values(batch.encoder_states)
        if self.watch is not None and key is not None:
            self.watch(query, key)
        metadata = batch.attention[self.group] if batch.groups else None
        out = self.backend.forward(self.spec, query, key, value, self.kv_cache, metadata)
        return self.out(out.flatten(1))

    def keys_and_values(self, states: Tensor | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """[E, Hq, D] each of encoder states [E, hidden_size]."""
        if states is None:
            return None, None
        both = self.key_value(states).view(states.shape[0], 2, -1, self.head_dim)
        return both[:, 0], both[:, 1]
