"""Self-attention: what all of it shares, and the causal one over the paged cache.

Letters: T tokens, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.attention import AttentionLayerSpec, AttentionNeed, KVViews
from headrace_core.kv import CACHE_DTYPES, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from headrace_core.ops import HeadNorm
from headrace_models.layers.base import Layer
from headrace_models.layers.linear import column_parallel, row_parallel, shard_of
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.kv_scales import KVScaleMeasure
    from headrace_core.model import BuildContext


class ProjectedAttention(Layer):
    """What all attention of tokens to each other shares: the projections around it, and its facts.

    Args:
        name: of the attention module, as the checkpoint spells it.
        rotary: cosines and sines [P, R] (:func:`headrace_models.layers.rotary.rotary_table`), or
            None for models with learned positions.
        scale: of the scores; default ``head_dim ** -0.5``.
        head_norm_eps: RMS norms over each head of query and key (Qwen3, Gemma 3); None = none.
        unbiased: with ``qkv_bias``, which of query, key and value (0, 1, 2) have none all the same.
        qkv_name, out_name, part_names: the checkpoint's module names below ``name``; empty
            part_names if it stores the projections fused.
        attention_type: of :data:`headrace_core.attention.ATTENTION_TYPES`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: Tensor | None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        unbiased: tuple[int, ...] = (),
        head_norm_eps: float | None = None,
        head_norm_offset: float = 0.0,
        qkv_name: str = "qkv_proj",
        out_name: str = "o_proj",
        part_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        attention_type: str = "decoder",
    ) -> None:
        self.ops = context.ops
        self.rotary = rotary
        self.head_dim = head_dim
        self.qkv = column_parallel(
            context,
            f"{name}.{qkv_name}",
            hidden_size,
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim),
            units=(num_heads, num_kv_heads, num_kv_heads),
            bias=qkv_bias,
            unbiased=unbiased,
            part_names=tuple(f"{name}.{part}" for part in part_names),
        )
        self.out = row_parallel(
            context, f"{name}.{out_name}", num_heads * head_dim, hidden_size, bias=out_bias
        )
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if head_norm_eps is not None:
            eps, offset = head_norm_eps, head_norm_offset
            self.query_norm = RMSNorm(context, f"{name}.q_norm", head_dim, eps, offset=offset)
            self.key_norm = RMSNorm(context, f"{name}.k_norm", head_dim, eps, offset=offset)

        heads = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        kv_heads = shard_of(num_kv_heads, context.communicator, what=f"{name}, key-value heads")
        self.spec = AttentionLayerSpec(
            name=name,
            num_heads=num_heads // heads.count,
            num_kv_heads=num_kv_heads // kv_heads.count,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            attention_type=attention_type,
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> query [T, Hq, D], key and value [T, Hk, D], views of one tensor."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hk, D]
        kv = self.spec.num_kv_heads
        query, key, value = torch.split(heads, [self.spec.num_heads, kv, kv], dim=1)
        return query, key, value


class SelfAttention(ProjectedAttention, ABC):
    """Of a step's tokens, with a cache or without. Arguments: :class:`ProjectedAttention`."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""


class Attention(SelfAttention):
    """Projections, rotation, cache and attention of one layer: core's ``AttentionLayer``.

    Its cache's scales can be measured (``MeasuresKVScales``). Arguments: :class:`ProjectedAttention`.
    """

    def __init__(self, context: BuildContext, name: str, **arguments: Any) -> None:
        super().__init__(context, name, **arguments)
        self.kv_spec: KVCacheSpec | None = _cache_spec(context, self.spec)
        self.backend = context.attention(
            AttentionNeed(
                head_dim=self.head_dim,
                dtype=context.dtype,
                kv_cache_dtype=context.kv_cache_dtype,
                block_size=context.block_size,
                device=context.device,
                sliding_window=self.spec.sliding_window is not None,
                soft_cap=self.spec.soft_cap > 0,
                has_sink=self.spec.sinks is not None,
            )
        )
        self.group = 0
        self.kv_cache: Tensor | None = None
        self.views: KVViews | None = None
        self.head_norm: HeadNorm | None = None
        self.scale_measure: KVScaleMeasure | None = None

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group
        self.views = None if kv_cache is None else self.backend.views(kv_cache)
        if self.query_norm is not None and self.key_norm is not None:
            self.head_norm = HeadNorm(
                self.query_norm.weight,
                self.key_norm.weight,
                self.query_norm.eps,
                self.query_norm.offset,
            )

    def measure_kv_scales(self, measure: KVScaleMeasure | None) -> None:
        """See :meth:`headrace_core.model.MeasuresKVScales.measure_kv_scales`."""
        self.scale_measure = measure

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        spec = self.spec
        query, key, value = self.project(x)
        if self.views is None or not batch.groups:  # memory is being profiled
            out = self.backend.forward(spec, query, key, value, None, None)
        else:
            if self.scale_measure is not None:
                stored = self._to_be_stored(query, key, value, batch.positions)
                spec = self.spec = self.scale_measure(spec, *stored)
            self.ops.rotary_cache_write(
                query,
                key,
                value,
                batch.positions,
                self.rotary,
                self.views.key_cache,
                self.views.value_cache,
                batch.groups[self.group].slot_mapping,
                head_norm=self.head_norm,
                k_scale=spec.k_scale,
                v_scale=spec.v_scale,
            )
            metadata = batch.attention[self.group]
            out = self.backend.forward(spec, query, None, None, self.kv_cache, metadata)
        return self.out(out.flatten(1))

    def _to_be_stored(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normed, rotated key and value [T, Hk, D]: written by the op that writes the cache, into
        one of the activations' dtype with a block for each token. The arguments stay as they are.
        """
        tokens = key.shape[0]
        keys, values = key.new_zeros((2, tokens, 1, *key.shape[1:]))
        self.ops.rotary_cache_write(
            query.clone(),
            key.clone(),
            value,
            positions,
            self.rotary,
            keys,
            values,
            torch.arange(tokens, device=key.device),
            head_norm=self.head_norm,
        )
        return keys.flatten(0, 1), values.flatten(0, 1)


def _cache_spec(context: BuildContext, spec: AttentionLayerSpec) -> KVCacheSpec:
    dtype = CACHE_DTYPES.get(context.kv_cache_dtype) or context.dtype
    facts = (context.block_size, spec.num_kv_heads, spec.head_dim, dtype)
    if spec.sliding_window is not None:
        return SlidingWindowSpec(*facts, sliding_window=spec.sliding_window)
    return FullAttentionSpec(*facts)
