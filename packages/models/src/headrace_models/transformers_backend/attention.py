"""Attention in place of transformers': layers over headrace's cache, found by the module that calls.

Letters: T tokens, Hq query heads, Hk key-value heads, D head size of query and key, Dv of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.attention import (
    CHUNKS,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
    EncoderBackend,
)
from headrace_core.kv import (
    CACHE_DTYPES,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from headrace_models.transformers_backend.masks import MaskFacts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headrace_core.attention import KVScaleMeasure
    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

STEP = "headrace_step"
"""The keyword argument in which a :class:`Step` goes through the tree to its attention."""
LAYERS = "headrace_attention"
"""Attribute of an attention module: its layers, one for each time that it attends in a step."""


class Step:
    """One run of a tree."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self.turns: dict[nn.Module, int] = {}

    def turn(self, module: nn.Module) -> int:
        """Number of times that the module has attended in this step. Those that loop over their layers have a
        cache for every round."""
        count = self.turns.get(module, 0)
        self.turns[module] = count + 1
        return count


class AttentionCall(NamedTuple):
    """Facts of one call of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head size of query and key; values may be shorter."""
    scale: float
    mask: MaskFacts
    soft_cap: float = 0.0
    sinks: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, Hq, T, D] and so on -> [1, T, Hq, Dv].

    Everything about the mask was found out before (:mod:`.attention_probe`); none is made any more.
    """
    layers: list[PagedLayer | EncoderLayer] = getattr(module, LAYERS)
    step: Step = kwargs[STEP]
    layer = layers[0] if len(layers) == 1 else layers[step.turn(module)]
    out = layer(_flat(query), _flat(key), _flat(value), step.batch)
    return out.unsqueeze(0), None


def _flat(heads: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D], a view: kernels read rows of any strides."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Layer:
    """Base of layers with a cache and without one."""

    spec: AttentionLayerSpec

    def widened(self, value: Tensor) -> Tensor:
        """Values [T, Hk, Dv] with zeros behind, as a cache has one size for keys and values."""
        missing = self.spec.head_dim - value.shape[-1]
        return torch.nn.functional.pad(value, (0, missing)) if missing else value


class PagedLayer(_Layer):
    """Causal attention of one module: core's ``AttentionLayer``. Its cache's scales can be measured."""

    def __init__(self, context: BuildContext, name: str, seen: AttentionCall) -> None:
        self.spec = _spec(name, seen, "decoder")
        self.kv_spec: KVCacheSpec | None = _cache_spec(context, self.spec, seen.mask.chunk)
        self.backend: AttentionBackend = context.attention(
            AttentionNeed(
                head_dim=seen.head_dim,
                dtype=context.dtype,
                kv_cache_dtype=context.kv_cache_dtype,
                block_size=context.block_size,
                device=context.device,
                features=_features(seen),
            )
        )
        self.group = 0
        self.kv_cache: Tensor | None = None
        self.scale_measure: KVScaleMeasure | None = None

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group

    def measure_kv_scales(self, measure: KVScaleMeasure | None) -> None:
        """See :meth:`headrace_core.model.MeasuresKVScales.measure_kv_scales`."""
        self.scale_measure = measure

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """query [T, Hq, D], key [T, Hk, D], value [T, Hk, Dv] -> [T, Hq, Dv]."""
        size, value = value.shape[-1], self.widened(value)
        if self.kv_cache is None or not batch.groups:  # memory is being profiled
            out = self.backend.forward(self.spec, query, key, value, None, None)
        else:
            if self.scale_measure is not None:
                self.spec = self.scale_measure(self.spec, key, value)
            metadata = batch.attention[self.group]
            out = self.backend.forward(self.spec, query, key, value, self.kv_cache, metadata)
        return out[..., :size]


class EncoderLayer(_Layer):
    """Attention of one module in both directions, without a cache."""

    def __init__(self, context: BuildContext, name: str, seen: AttentionCall) -> None:
        self.spec = _spec(name, seen, "encoder_only")
        self.backend: EncoderBackend = context.encoder_attention(
            AttentionNeed(
                head_dim=seen.head_dim,
                dtype=context.dtype,
                kv_cache_dtype="auto",
                block_size=context.block_size,
                device=context.device,
                attention_type="encoder_only",
                features=_features(seen),
            )
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Attention as in :meth:`PagedLayer.__call__`."""
        out = self.backend.attend(
            self.spec,
            query,
            key,
            self.widened(value),
            batch.cu_seqlens_q,
            batch.max_seqlen_q,
            key_lens=batch.key_lens,
        )
        return out[..., : value.shape[-1]]


def _spec(name: str, seen: AttentionCall, attention_type: str) -> AttentionLayerSpec:
    extras = {
        "soft_cap": seen.soft_cap or None,
        "sinks": seen.sinks,
        "attention_chunk": seen.mask.chunk,
    }
    return AttentionLayerSpec(
        name=name,
        num_heads=seen.num_heads,
        num_kv_heads=seen.num_kv_heads,
        head_dim=seen.head_dim,
        scale=seen.scale,
        sliding_window=seen.mask.window,
        attention_type=attention_type,
        extras={name: value for name, value in extras.items() if value is not None},
    )


def _features(seen: AttentionCall) -> frozenset[str]:
    asked = {
        SLIDING_WINDOW: seen.mask.window is not None,
        SOFT_CAP: seen.soft_cap > 0,
        SINKS: seen.sinks is not None,
        CHUNKS: seen.mask.chunk is not None,
    }
    return frozenset(feature for feature, is_asked in asked.items() if is_asked)


def _cache_spec(context: BuildContext, spec: AttentionLayerSpec, chunk: int | None) -> KVCacheSpec:
    dtype = CACHE_DTYPES.get(context.kv_cache_dtype) or context.dtype
    facts = (context.block_size, spec.num_kv_heads, spec.head_dim, dtype)
    if spec.sliding_window is not None:
        return SlidingWindowSpec(*facts, sliding_window=spec.sliding_window)
    if chunk is not None:
        return ChunkedLocalSpec(*facts, attention_chunk_size=chunk)
    return FullAttentionSpec(*facts)
