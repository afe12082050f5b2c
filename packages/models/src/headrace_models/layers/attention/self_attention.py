"""Self-attention: what all of it shares, and the causal one over the paged cache.

Letters: T tokens, Hq query heads, Hk key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.attention import (
    ALIBI,
    CHUNKS,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
    KVViews,
)
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import (
    CACHE_DTYPES,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from headrace_core.ops import HeadNorm
from headrace_core.ops.optional.clamp import CLAMP
from headrace_models.layers.attention.heads_norm import (
    HeadLayerNorm,
    HeadLayerNorms,
    WholeLayerNorm,
    WholeRMSNorm,
)
from headrace_models.layers.base import Layer, Part, Shard, Slot, WeightLayer
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel, shard_of
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.rotary import ROTARY_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.attention import KVScaleMeasure
    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


HeadsNorm = RMSNorm | LayerNorm | WholeRMSNorm | WholeLayerNorm | HeadLayerNorm | HeadLayerNorms
"""A norm of the heads of query or key, [T, heads, D]."""


class ProjectedAttention(Layer):
    """Base of all attention of tokens to each other: the projections around it, and its facts.

    Args:
        name: of the attention module, as the checkpoint spells it.
        rotary: cosines and sines [P, R] (:func:`headrace_models.layers.rotary.rotary_table`), or
            None for models with learned positions.
        interleaved: rotary pairs are neighbours (:class:`headrace_core.ops.RotaryOp`): GPT-J, GLM,
            Cohere.
        scale: of the scores; default ``head_dim ** -0.5``.
        clip: query, key and value are clamped to that magnitude (MPT, OLMo, DBRX); None = not.
        head_norm_eps: RMS norms over each head of query and key (Qwen3, Gemma 3); None = none.
        query_norm, key_norm: other norms of query [T, Hq, D] and key [T, Hk, D]: a
            :class:`~headrace_models.layers.norm.LayerNorm` of ``head_dim`` for all heads, or one of
            :mod:`headrace_models.layers.attention.heads_norm`. Not with ``head_norm_eps``.
        norm_after_rotary: norms come after the rotation (Hunyuan, Llama 4).
        value_norm: of each value head (Gemma 3n and 4).
        values_are_keys: values are what keys are before their norm and rotation (Gemma 4); needs
            ``value_norm``, which makes them a tensor of their own.
        makes_keys: False for a layer that has no projections to keys and values of its own.
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
        interleaved: bool = False,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float = 0.0,
        clip: float | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        unbiased: tuple[int, ...] = (),
        head_norm_eps: float | None = None,
        head_norm_offset: float = 0.0,
        query_norm: HeadsNorm | None = None,
        key_norm: HeadsNorm | None = None,
        norm_after_rotary: bool = False,
        value_norm: RMSNorm | None = None,
        values_are_keys: bool = False,
        makes_keys: bool = True,
        qkv_name: str = "qkv_proj",
        out_name: str = "o_proj",
        part_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        attention_type: str = "decoder",
    ) -> None:
        self.ops = context.ops
        self.rotary, self.interleaved = rotary, interleaved
        self.head_dim = head_dim
        self.clip, self.clamp = clip, None if clip is None else context.ops.optional(CLAMP)
        self.makes_keys = makes_keys
        self.values_are_keys = values_are_keys
        projected = 0 if not makes_keys else 1 if values_are_keys else 2
        units = (num_heads, *(num_kv_heads for _ in range(projected)))
        self.qkv = column_parallel(
            context,
            f"{name}.{qkv_name}",
            hidden_size,
            tuple(count * head_dim for count in units),
            units=units,
            bias=qkv_bias,
            unbiased=unbiased,
            part_names=tuple(f"{name}.{part}" for part in part_names[: len(units)]),
        )
        self.out = row_parallel(
            context, f"{name}.{out_name}", num_heads * head_dim, hidden_size, bias=out_bias
        )
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm
        self.norm_after_rotary = norm_after_rotary
        if head_norm_eps is not None:
            eps, offset = head_norm_eps, head_norm_offset
            self.query_norm = RMSNorm(context, f"{name}.q_norm", head_dim, eps, offset=offset)
            if makes_keys:
                self.key_norm = RMSNorm(context, f"{name}.k_norm", head_dim, eps, offset=offset)

        # A head that two ranks keep would be added twice by the output layer.
        heads = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        kv_heads = shard_of(num_kv_heads, context.communicator, what=f"{name}, key-value heads")
        self.kv_copies = context.communicator.world_size // kv_heads.count
        self.spec = AttentionLayerSpec(
            name=name,
            num_heads=num_heads // heads.count,
            num_kv_heads=num_kv_heads // kv_heads.count,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            attention_type=attention_type,
            extras={"soft_cap": soft_cap} if soft_cap > 0 else {},
        )

    @property
    def features(self) -> frozenset[str]:
        """Features that the layer asks of a backend besides plain attention."""
        asked = {
            SLIDING_WINDOW: self.spec.sliding_window is not None,
            SOFT_CAP: "soft_cap" in self.spec.extras,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> query [T, Hq, D], key and value [T, Hk, D], views of one tensor.

        A layer that makes no keys has [T, 0, D] for both.
        """
        projected = self.qkv(x)
        if self.clip is not None and self.clamp is not None:
            projected = self.clamp(projected, -self.clip, self.clip)
        heads = projected.view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 Hk, D]
        if not self.makes_keys:
            return heads, heads[:, :0], heads[:, :0]
        kv = self.spec.num_kv_heads
        if self.values_are_keys:
            query, key = torch.split(heads, [self.spec.num_heads, kv], dim=1)
            value = key
        else:
            query, key, value = torch.split(heads, [self.spec.num_heads, kv, kv], dim=1)
        return query, key, value if self.value_norm is None else self.value_norm(value)

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, Hq, D] and key [T, Hk, D] by their norms, if there are any."""
        if self.query_norm is not None:
            query = self.query_norm(query)
        if self.key_norm is not None:
            key = self.key_norm(key)
        return query, key


class SelfAttention(Layer, ABC):
    """Attention of a step's tokens to each other, with a cache or without."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""


class CachedLayer(Layer, ABC):
    """A layer that a decoder counts among its attention layers: core's ``AttentionLayer``."""

    spec: AttentionLayerSpec
    kv_spec: KVCacheSpec | None
    backend: AttentionBackend

    @abstractmethod
    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""


class CachedAttention(SelfAttention, CachedLayer):
    """Attention of a step's tokens over the paged cache."""


class Attention(ProjectedAttention, CachedAttention):
    """Projections, rotation, cache and attention of one layer: core's ``AttentionLayer``.

    Its cache's scales can be measured (``MeasuresKVScales``).

    Other arguments: :class:`ProjectedAttention`.

    Args:
        attention_chunk_size: see :class:`~headrace_core.kv.ChunkedLocalSpec`.
        kv_sharing_target: see :class:`~headrace_core.attention.AttentionLayerSpec`; a layer that reads
            another's cache projects to queries only.
        alibi_slopes: [num_heads] float32, of all ranks.
        sinks: the checkpoint has one more logit for each head (``sinks`` [num_heads], gpt-oss), which
            goes into ``attention.sinks.weight``.
        query_temperature: [P] float32, the last thing that query is multiplied by, by position
            (Llama 4).
        extras: other options of the attention op, of this rank, which nothing reads on the way
            (:attr:`~headrace_core.attention.AttentionLayerSpec.extras`); a subclass may add to ``spec``'s
            before the first step.
        features: what a backend must serve for them (:data:`~headrace_core.attention.FEATURE_TEXTS`, or a
            name of the family's own).
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_heads: int,
        attention_chunk_size: int | None = None,
        kv_sharing_target: str | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: bool = False,
        query_temperature: Tensor | None = None,
        extras: Mapping[str, Tensor | float | None] | None = None,
        features: Collection[str] = (),
        **arguments: Any,
    ) -> None:
        shares = kv_sharing_target is not None
        super().__init__(context, name, num_heads=num_heads, makes_keys=not shares, **arguments)
        shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        self.sinks = Sinks(f"{name}.sinks", num_heads, shard) if sinks else None
        self.temperature: Tensor | None = None
        if query_temperature is not None:
            self.temperature = temperature_table(query_temperature, self.head_dim)
        own: dict[str, Tensor | float] = {}
        asked = {*features, *self.features}
        if attention_chunk_size is not None:
            own["attention_chunk"] = attention_chunk_size
            asked.add(CHUNKS)
        if alibi_slopes is not None:
            own["alibi_slopes"] = alibi_slopes.chunk(shard.count)[shard.index].to(context.device)
            asked.add(ALIBI)
        if sinks:
            asked.add(SINKS)
        self.spec = replace(
            self.spec,
            kv_sharing_target=kv_sharing_target,
            extras={**self.spec.extras, **own, **(extras or {})},
        )
        self.kv_spec = None if shares else _cache_spec(context, self.spec, attention_chunk_size)
        self.backend = context.attention(
            AttentionNeed(
                head_dim=self.head_dim,
                dtype=context.dtype,
                kv_cache_dtype=context.kv_cache_dtype,
                block_size=context.block_size,
                device=context.device,
                features=frozenset(asked),
            )
        )
        self.group = 0
        self.kv_cache: Tensor | None = None
        self.views: KVViews | None = None
        self.head_norm: HeadNorm | None = None
        self.scale_measure: KVScaleMeasure | None = None
        self.source_spec: Callable[[], AttentionLayerSpec] | None = None

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group
        self.views = None if kv_cache is None else self.backend.views(kv_cache)
        self.head_norm = self._fused_norm()
        if self.sinks is not None:
            self.spec = replace(self.spec, extras={**self.spec.extras, "sinks": self.sinks.weight})

    def share(self, source: Attention) -> None:
        """``source`` is the layer whose cache this one reads, and whose scales that is stored with."""
        self.source_spec = lambda: source.spec

    def measure_kv_scales(self, measure: KVScaleMeasure | None) -> None:
        """See :meth:`headrace_core.model.MeasuresKVScales.measure_kv_scales`."""
        self.scale_measure = measure

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.out(self.attend(*self.project(x), batch).flatten(1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Results of :meth:`project` -> [T, Hq, D]: everything between the projections."""
        if self.views is None or not batch.groups:  # memory is being profiled
            return self.backend.forward(self.spec, query, key, value, None, None)
        if self.scale_measure is not None and self.makes_keys:
            stored = self._to_be_stored(query, key, value, batch.positions)
            self.spec = self.scale_measure(self.spec, *stored)
        if self.source_spec is not None:
            self._take_scales(self.source_spec())
        slots = self.backend.slots(batch, self.group)
        scales = {"k_scale": self.spec.k_scale, "v_scale": self.spec.v_scale}
        positions, rotary = batch.positions, self.rotary
        if ROTARY_ROWS in batch.extra and rotary is not None:
            rotary = batch.extra[ROTARY_ROWS]
            positions = torch.arange(positions.shape[0], device=positions.device)
        query = self._store(query, key, value, positions, rotary, self.views, slots, scales)
        metadata = batch.attention[self.group]
        return self.backend.forward(self.spec, query, None, None, self.kv_cache, metadata)

    def _take_scales(self, source: AttentionLayerSpec) -> None:
        own = self.spec
        if own.k_scale is not source.k_scale or own.v_scale is not source.v_scale:
            self.spec = replace(own, k_scale=source.k_scale, v_scale=source.v_scale)

    def _fused_norm(self) -> HeadNorm | None:
        """The norms, if they are of the kind that goes with rotation and write in one pass."""
        query, key = self.query_norm, self.key_norm
        if self.norm_after_rotary or type(query) is not RMSNorm or type(key) is not RMSNorm:
            return None
        return HeadNorm(query.weight, key.weight, query.eps, query.offset)

    def _store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        rotary: Tensor | None,
        caches: KVViews,
        slots: Tensor,
        scales: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Norm, rotate, write; returns query as it asks. query and key may be changed in place."""
        interleaved = self.interleaved
        if rotary is not None and self.norm_after_rotary:
            self.ops.rotary(query, key, positions, rotary, interleaved=interleaved)
            rotary = None
        if self.head_norm is None:
            query, key = self.normed(query, key)
        if self.makes_keys:
            self.ops.rotary_cache_write(
                query,
                key,
                value,
                positions,
                rotary,
                caches.key_cache,
                caches.value_cache,
                slots,
                interleaved=interleaved,
                head_norm=self.head_norm,
                **scales,
            )
        elif rotary is not None:
            self.ops.rotary(query, key, positions, rotary, interleaved=interleaved)
        if self.temperature is not None:
            self.ops.rotary(query, query[:, :0], positions, self.temperature, interleaved=False)
        return query

    def _to_be_stored(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normed, rotated key and value [T, Hk, D]: written by the op that writes the cache, into
        one of the activations' dtype with a block for each token. The arguments stay as they are.
        """
        tokens = key.shape[0]
        caches = KVViews(*key.new_zeros((2, tokens, 1, *key.shape[1:])))
        slots = torch.arange(tokens, device=key.device)
        self._store(query.clone(), key.clone(), value, positions, self.rotary, caches, slots, {})
        return caches.key_cache.flatten(0, 1), caches.value_cache.flatten(0, 1)


class Sinks(WeightLayer):
    """A logit for each head that takes part in the softmax's sum and stands for no key."""

    weight: Tensor

    def __init__(self, name: str, num_heads: int, shard: Shard) -> None:
        self.name = name
        self.part = Part(num_heads // shard.count, shard)

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.part.size,), "float32", parts=(self.part,), any_float=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


def _cache_spec(context: BuildContext, spec: AttentionLayerSpec, chunk: int | None) -> KVCacheSpec:
    dtype = CACHE_DTYPES.get(context.kv_cache_dtype) or context.dtype
    facts = (context.block_size, spec.num_kv_heads, spec.head_dim, dtype)
    if spec.sliding_window is not None:
        return SlidingWindowSpec(*facts, sliding_window=spec.sliding_window)
    if chunk is not None:
        return ChunkedLocalSpec(*facts, attention_chunk_size=chunk)
    return FullAttentionSpec(*facts)


def temperature_table(factors: Tensor, head_dim: int) -> Tensor:
    """[P] -> [P, D]: a rotary table whose angles are 0 and whose cosines are the factors, so that
    to rotate by it is to multiply.

    Raises:
        UnsupportedModel: the head's size is odd.
    """
    if head_dim % 2:
        raise UnsupportedModel(
            f"config.json: head_dim = {head_dim}: must be even where queries are multiplied by a "
            "number of their position"
        )
    cosines = factors[:, None].expand(-1, head_dim // 2)
    return torch.cat((cosines, torch.zeros_like(cosines)), dim=1)
