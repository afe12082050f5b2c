"""The contract of attention backends.

A backend prepares its metadata once a batch (per cache group) and runs once a layer. It says with
reasons what it cannot serve. Backends are plug-ins (``headrace.attention_backends``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace_core.errors import ConfigError
from headrace_core.kv import ROW_SCALED_BITS, KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable

ATTENTION_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")
"""``decoder``: causal, paged cache. ``encoder`` (of an encoder-decoder model, of media) and
``encoder_only``: both directions, no cache. ``encoder_decoder``: queries of a decoder, keys and values
of an encoder, paged and written once."""

UNCACHED_TYPES = ("encoder", "encoder_only")
"""Types of :data:`ATTENTION_TYPES` without a cache for keys and values; an :class:`EncoderBackend`
serves them."""

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Values that ``cache.block_size`` may take."""


MLA = "mla"
SINKS = "sinks"
SPARSE_TOPK = "sparse_topk"
SLIDING_WINDOW = "sliding_window"
SOFT_CAP = "soft_cap"
CHUNKS = "chunks"
ALIBI = "alibi"
ALIBI_SQRT = "alibi_sqrt"
KV_PREFIX = "kv_prefix"
LOGIT_SCALE = "logit_scale"
LAST_KEYS = "last_keys"

FEATURE_TEXTS: Mapping[str, str] = {
    MLA: "MLA",
    SINKS: "sink setting",
    SPARSE_TOPK: "sparse",
    SLIDING_WINDOW: "sliding window",
    SOFT_CAP: "logits soft cap",
    CHUNKS: "attention within chunks",
    ALIBI: "ALiBi",
    ALIBI_SQRT: "ALiBi by the root of the distance",
    KV_PREFIX: "learned KV prefix",
    LOGIT_SCALE: "per-position logit scale",
    LAST_KEYS: "attention to later tokens of an image",
}
"""Features that a layer may need beyond plain attention -> its name in a refusal, in the order of refusals.

``mla``: multi-head latent attention (:class:`MLABackend`), ``head_dim`` being that of its cache;
``sparse_topk``: MLA to tokens that an indexer chooses (``topk_indices`` of :meth:`MLABackend.attend`);
``chunks``: see :class:`~headrace_core.kv.ChunkedLocalSpec`. The others are the extras of
:class:`headrace_core.ops.PagedAttentionOp`. The list is not closed: a family may ask for a feature that is
not in it, by a name that its backend knows, and a refusal then says that name.
"""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """Requirements of a model's attention on a backend; equal needs get equal choices."""

    head_dim: int
    dtype: str
    kv_cache_dtype: str
    """One of :data:`headrace_core.kv.CACHE_DTYPES`; ``auto`` means the activations' dtype."""
    block_size: int
    device: str = "cpu"
    attention_type: str = "decoder"
    """One of :data:`ATTENTION_TYPES`."""
    features: frozenset[str] = frozenset()
    """Features of :data:`FEATURE_TEXTS`, or others."""

    def __str__(self) -> str:
        """Field by field; features are sorted, so that equal needs read alike in every process."""
        facts = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "features": sorted(self.features)
        }
        return f"AttentionNeed({', '.join(f'{name}={value!r}' for name, value in facts.items())})"


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """The facts of one attention layer, per rank once sharded."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    k_scale: Tensor | None = None
    """[num_kv_heads] float32: what a stored 1 of a one-byte cache stands for; None = 1. Of rows with their
    own (:data:`~headrace_core.kv.ROW_SCALED_BITS`) [N, S, num_kv_heads], of MLA [N, S, 2], in the cache."""
    v_scale: Tensor | None = None
    attention_type: str = "decoder"
    """One of :data:`ATTENTION_TYPES`."""
    kv_sharing_target: str | None = None
    """Name of an earlier layer of the same kind whose cache this one reads instead of one of its own;
    its ``kv_spec`` is None then, and the runner binds it to the target's tensor and group."""
    latent_dim: int = 0
    """MLA: R, the first of the ``head_dim`` entries, which are the value."""
    extras: Mapping[str, Tensor | float | None] = field(default_factory=dict)
    """Options of the op that few models have (:class:`headrace_core.ops.PagedAttentionOp` lists
    those that are known). Backends hand them on unread, and the op checks them; a layer with extras
    asks for the features that they belong to."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"layer {self.name!r}: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )


class KVViews(NamedTuple):
    """A paged cache as kernels see it: plain, or paired (:mod:`headrace_core.ops.vnni`)."""

    key_cache: Tensor
    """[N, S, Hk, D], any strides; or [N, Hk, S / 16, D / 2, 16, 2]."""
    value_cache: Tensor
    """[N, S, Hk, D], any strides; or [N, Hk, S / 2, D, 2]."""


class BackendFacts(ABC):
    """Capabilities of an attention backend. Holds no weights and no per-request state."""

    name: ClassVar[str]
    """Name that a user types; equal to the entry point's name."""
    supported_dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto",)
    supported_devices: ClassVar[Sequence[str]] = ("cpu",)
    supported_head_dims: ClassVar[Sequence[int]] = ()
    """Empty = any."""
    supported_attention_types: ClassVar[Sequence[str]] = ("decoder",)
    supported_features: ClassVar[frozenset[str]] = frozenset()
    """Supported features of :data:`FEATURE_TEXTS`, or features of others by their names."""
    required_features: ClassVar[frozenset[str]] = frozenset()
    """Features without which a need is refused."""

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    @classmethod
    def refuse(cls, need: AttentionNeed) -> list[str]:
        """All reasons why this backend cannot serve, in a fixed order; empty = it can.

        What the need says of the cache counts only where there is one.
        """
        cached = need.attention_type not in UNCACHED_TYPES
        features = [
            *(f"{text} not supported" for text in _texts(need.features - cls.supported_features)),
            *(
                f"non-{text} not supported"
                for text in _texts(cls.required_features - need.features)
            ),
        ]
        checks = (
            (not cls.supported_head_dims or need.head_dim in cls.supported_head_dims,
             "head_size not supported"),
            (need.dtype in cls.supported_dtypes, "dtype not supported"),
            (not cached or need.kv_cache_dtype in cls.supported_kv_cache_dtypes,
             "kv_cache_dtype not supported"),
            (not cached or need.head_dim * ROW_SCALED_BITS.get(need.kv_cache_dtype, 8) % 8 == 0,
             f"kv_cache_dtype {need.kv_cache_dtype} needs an even head_dim, not {need.head_dim}"),
            (not cached or need.block_size in BLOCK_SIZES, "block_size not supported"),
            *((False, reason) for reason in features),
            (need.device in cls.supported_devices, f"device {need.device} not supported"),
            (need.attention_type in cls.supported_attention_types,
             f"attention type {need.attention_type} not supported"),
        )  # fmt: skip
        return [reason for served, reason in checks if not served]


def _texts(features: frozenset[str]) -> list[str]:
    """Texts in the order of :data:`FEATURE_TEXTS`; features that are not in it come last, by name."""
    known = [text for feature, text in FEATURE_TEXTS.items() if feature in features]
    return known + sorted(features - FEATURE_TEXTS.keys())


class AttentionBackend(BackendFacts):
    """One way to compute attention over a paged cache."""

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache: (2, N, S, Hk, D), keys first; D is ``row_width``."""
        return (2, num_blocks, spec.page_tokens, spec.num_kv_heads, spec.row_width)

    def cache_stride_order(self) -> tuple[int, ...]:
        """Entry i names the logical dimension stored at physical position i (a permutation)."""
        return (0, 1, 2, 3, 4)

    def views(self, kv_cache: Tensor) -> KVViews:
        """Key and value views of a cache of :meth:`cache_shape` (logical order), as its ops take it.

        Plain here; a backend may give its ops another order of the same bytes.
        """
        return KVViews(kv_cache[0], kv_cache[1])

    def slots(self, batch: ForwardBatch, group: int) -> Tensor:
        """Slot mapping by which a layer writes this rank's tokens of the batch."""
        return batch.groups[group].slot_mapping

    @abstractmethod
    def prepare(self, batch: ForwardBatch, group: int) -> Any:
        """Metadata for ``batch.groups[group]``; computed once, handed to every layer's forward."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
    ) -> Tensor:
        """Attention of one layer.

        A layer of type ``encoder_decoder`` sees all of its group's encoder states
        (:attr:`~headrace_core.batch.GroupBatch.seq_lens`), every token of its query alike.

        Args:
            query: [T, num_heads, head_dim].
            key, value: [T, num_kv_heads, head_dim] to be written first, or None if the caller
                has already written them (``rotary_cache_write``). Of ``encoder_decoder`` [E, ...],
                given in the step that encodes and None afterwards.
            kv_cache: of :meth:`cache_shape`; None while memory is profiled: the result is zeros.
            metadata: from :meth:`prepare`, or None while memory is profiled.

        Returns:
            [T, num_heads, head_dim], contiguous, query's dtype.
        """


class MLABackend(AttentionBackend):
    """One way to compute latent attention (:class:`~headrace_core.kv.MLASpec`), absorbed:
    queries of all heads ask one vector for each token. Letters: R ``latent_dim``, P the rest of it.
    """

    supported_features: ClassVar[frozenset[str]] = frozenset({MLA})
    required_features: ClassVar[frozenset[str]] = frozenset({MLA})

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache: (N, S, R + P), as above."""
        return (num_blocks, spec.page_tokens, spec.row_width)

    def cache_stride_order(self) -> tuple[int, ...]:
        return (0, 1, 2)

    def views(self, kv_cache: Tensor) -> KVViews:
        """Keys and values are the same vectors, [N, S, 1, R + P]."""
        return KVViews(kv_cache[:, :, None], kv_cache[:, :, None])

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        rope_query: Tensor,
        latent: Tensor | None,
        rope_key: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
        *,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            query, rope_query: [T, num_heads, R] and [T, num_heads, P].
            latent, rope_key: [T, R] and [T, P] to be written first, or None if the caller has.
            kv_cache, metadata: as :meth:`AttentionBackend.forward`.
            topk_indices: the tokens that each token sees, as :class:`headrace_core.ops.MLAAttentionOp`
                takes them; given only if the need has the feature ``sparse_topk``.

        Returns:
            [T, num_heads, R], contiguous, query's dtype.
        """

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
    ) -> Tensor:
        """The same of whole vectors: query [T, num_heads, R + P], key [T, 1, R + P] or None; what is
        said of ``value`` is in key. Returns [T, num_heads, R]."""
        cut = layer.latent_dim
        latent, rope_key = (None, None) if key is None else (key[:, 0, :cut], key[:, 0, cut:])
        return self.attend(
            layer, query[..., :cut], query[..., cut:], latent, rope_key, kv_cache, metadata
        )


class EncoderBackend(BackendFacts):
    """One way to compute attention in both directions, without a cache.

    A class may be this and an :class:`AttentionBackend`.
    """

    supported_attention_types: ClassVar[Sequence[str]] = ("encoder", "encoder_only")

    @abstractmethod
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
        """Attention of one layer; sequences do not see each other.

        Args:
            layer: with a ``sliding_window`` W, a token sees those less than W away.
            query: [T, num_heads, head_dim]; may be a strided slice of a fused projection.
            key, value: [T, num_kv_heads, head_dim].
            cu_seqlens: [B + 1] int32.
            max_seqlen: the longest sequence.
            distance_bias: see :class:`headrace_core.ops.VarlenAttentionOp`.
            key_lens: [B] int32: only so many of a sequence's first tokens are seen; None: all.

        Returns:
            [T, num_heads, head_dim], contiguous, query's dtype.
        """


LARGEST: Mapping[str, float] = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
"""Largest magnitude that a cache of :attr:`headrace_core.kv.KVCacheSpec.dtype` stores."""


KVScaleMeasure = Callable[["AttentionLayerSpec", "Tensor", "Tensor"], "AttentionLayerSpec"]
"""(spec, key [T, Hk, D], value [T, Hk, D]) -> the spec with the scales that suit them.

key and value are what the layer would store, in the activations' dtype: head norms and rotation
done.
"""
