"""What an attention backend must do, and how one is chosen.

A backend prepares its metadata once a batch (per cache group) and runs once a layer. It says with
reasons what it cannot serve; choosing is a loop over candidates, and the error of a failed choice
shows every candidate and why it was passed over.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.kv import KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable

logger = logging.getLogger(__name__)

ATTENTION_TYPES = ("decoder", "encoder", "encoder_only", "encoder_decoder")
"""``decoder``: causal, paged cache. ``encoder`` (of an encoder-decoder model, of media) and
``encoder_only``: both directions, no cache. ``encoder_decoder``: queries of a decoder, keys and values
of an encoder, paged and written once."""

UNCACHED_TYPES = ("encoder", "encoder_only")
"""Those of :data:`ATTENTION_TYPES` whose keys and values are forgotten; an :class:`EncoderBackend`
serves them."""

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Values that ``cache.block_size`` may take."""


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What a model's attention asks of a backend; equal needs get equal choices."""

    head_dim: int
    dtype: str
    kv_cache_dtype: str
    """One of :data:`headrace_core.kv.CACHE_DTYPES`; ``auto`` means the activations' dtype."""
    block_size: int
    device: str = "cpu"
    attention_type: str = "decoder"
    """One of :data:`ATTENTION_TYPES`."""
    sliding_window: bool = False
    soft_cap: bool = False
    has_sink: bool = False
    chunked: bool = False
    """Attention within chunks (:class:`~headrace_core.kv.ChunkedLocalSpec`)."""
    alibi: bool = False
    alibi_sqrt: bool = False
    """ALiBi by the root of the distance."""
    prefix: bool = False
    """Keys and values of the layer's own, which every token sees."""
    temperatures: bool = False
    """Scores that are multiplied by the query's position (``score_temperatures`` of the layer)."""
    latent: bool = False
    """Latent attention (:class:`LatentBackend`); ``head_dim`` is that of its cache."""
    picked: bool = False
    """Latent attention to tokens that an indexer picks (``picked`` of :meth:`LatentBackend.attend`)."""


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec:
    """The facts of one attention layer, per rank once sharded."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    """[num_heads] in the activations' dtype or float32."""
    k_scale: Tensor | None = None
    """[num_kv_heads] float32: what a stored 1 of a one-byte cache stands for; None = 1."""
    v_scale: Tensor | None = None
    attention_type: str = "decoder"
    """One of :data:`ATTENTION_TYPES`."""
    attention_chunk_size: int | None = None
    """See :class:`~headrace_core.kv.ChunkedLocalSpec`; not together with a window."""
    alibi_slopes: Tensor | None = None
    """[num_heads] float32: ``slope * (j - p)`` is added to the score of key j for a query at p. Press
    et al. 2021, arXiv:2108.12409."""
    alibi_sqrt: bool = False
    """``-slope * sqrt(p - j)`` is added instead (Step 1)."""
    prefix_key: Tensor | None = None
    """[S, num_kv_heads, head_dim] in the activations' dtype: keys that every token sees besides, with
    their values; learned, and cached by nobody (openPangu Pro)."""
    prefix_value: Tensor | None = None
    score_temperatures: Tensor | None = None
    """[P] float32, by position: what the query's capped scores are multiplied by."""
    kv_sharing_target: str | None = None
    """Name of an earlier layer of the same kind whose cache this one reads instead of one of its own;
    its ``kv_spec`` is None then, and the runner binds it to the target's tensor and group."""
    latent_dim: int = 0
    """Of latent attention, R: the first of the ``head_dim`` entries, which are the value."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"layer {self.name!r}: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )


class KVViews(NamedTuple):
    """A paged cache as kernels see it: plain, or paired (:mod:`headrace_core.paired`)."""

    key_cache: Tensor
    """[N, S, Hk, D], any strides; or [N, Hk, S / 16, D / 2, 16, 2]."""
    value_cache: Tensor
    """[N, S, Hk, D], any strides; or [N, Hk, S / 2, D, 2]."""


class BackendFacts(ABC):
    """What an attention backend can serve. Holds no weights and no per-request state."""

    name: ClassVar[str]
    """What a user types; equal to the entry point's name."""
    supported_dtypes: ClassVar[Sequence[str]] = ("float32", "float16", "bfloat16")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto",)
    supported_devices: ClassVar[Sequence[str]] = ("cpu",)
    supported_head_dims: ClassVar[Sequence[int]] = ()
    """Empty = any."""
    supported_attention_types: ClassVar[Sequence[str]] = ("decoder",)
    supports_soft_cap: ClassVar[bool] = False
    supports_sink: ClassVar[bool] = False
    supports_sliding_window: ClassVar[bool] = False
    supports_chunks: ClassVar[bool] = False
    supports_alibi: ClassVar[bool] = False
    supports_alibi_sqrt: ClassVar[bool] = False
    supports_prefix: ClassVar[bool] = False
    supports_temperatures: ClassVar[bool] = False
    is_latent: ClassVar[bool] = False
    """Whether it is a :class:`LatentBackend`: those serve latent attention and nothing else."""
    supports_picked: ClassVar[bool] = False

    def __init__(self, ops: OpTable) -> None:
        self.ops = ops

    @classmethod
    def refuse(cls, need: AttentionNeed) -> list[str]:
        """All reasons why this backend cannot serve, in a fixed order; empty = it can.

        What the need says of the cache counts only where there is one.
        """
        cached = need.attention_type not in UNCACHED_TYPES
        checks = (
            (not cls.supported_head_dims or need.head_dim in cls.supported_head_dims,
             "head_size not supported"),
            (need.dtype in cls.supported_dtypes, "dtype not supported"),
            (not cached or need.kv_cache_dtype in cls.supported_kv_cache_dtypes,
             "kv_cache_dtype not supported"),
            (not cached or need.block_size in BLOCK_SIZES, "block_size not supported"),
            (cls.supports_sink or not need.has_sink, "sink setting not supported"),
            (need.device in cls.supported_devices, f"device {need.device} not supported"),
            (need.attention_type in cls.supported_attention_types,
             f"attention type {need.attention_type} not supported"),
            (cls.supports_sliding_window or not need.sliding_window,
             "sliding window not supported"),
            (cls.supports_soft_cap or not need.soft_cap, "logits soft cap not supported"),
            (cls.supports_chunks or not need.chunked, "attention within chunks not supported"),
            (cls.supports_alibi or not need.alibi, "ALiBi not supported"),
            (cls.supports_alibi_sqrt or not need.alibi_sqrt,
             "ALiBi by the root of the distance not supported"),
            (cls.supports_prefix or not need.prefix, "keys that every token sees not supported"),
            (cls.supports_temperatures or not need.temperatures,
             "temperatures of scores not supported"),
            (cls.is_latent == need.latent,
             "latent attention not supported" if need.latent else "latent attention only"),
            (cls.supports_picked or not need.picked, "attention to picked tokens not supported"),
        )  # fmt: skip
        return [reason for served, reason in checks if not served]


class AttentionBackend(BackendFacts):
    """One way to compute attention over a paged cache."""

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache: (2, N, S, Hk, D), keys first."""
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)

    def cache_stride_order(self) -> tuple[int, ...]:
        """Entry i names the logical dimension stored at physical position i (a permutation)."""
        return (0, 1, 2, 3, 4)

    def views(self, kv_cache: Tensor) -> KVViews:
        """Key and value views of a cache of :meth:`cache_shape` (logical order), as its ops take it.

        Plain here; a backend may give its ops another order of the same bytes.
        """
        return KVViews(kv_cache[0], kv_cache[1])

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


class LatentBackend(AttentionBackend):
    """One way to compute latent attention (:class:`~headrace_core.kv.LatentAttentionSpec`), absorbed:
    queries of all heads ask one vector for each token. Letters: R ``latent_dim``, P the rest of it.
    """

    is_latent: ClassVar[bool] = True

    def cache_shape(self, spec: KVCacheSpec, num_blocks: int) -> tuple[int, ...]:
        """Logical shape of one layer's cache: (N, S, R + P)."""
        return (num_blocks, spec.block_size, spec.head_dim)

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
        picked: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            query, rope_query: [T, num_heads, R] and [T, num_heads, P].
            latent, rope_key: [T, R] and [T, P] to be written first, or None if the caller has.
            kv_cache, metadata: as :meth:`AttentionBackend.forward`.
            picked: the tokens that each token sees, as :class:`headrace_core.ops.LatentAttentionOp`
                takes them; given only if the need said so.

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


def choose_backend(
    need: AttentionNeed, *, wanted: str | None = None, preferred: Sequence[str] = ()
) -> type[BackendFacts]:
    """Pick a backend class: an :class:`EncoderBackend` for attention that caches nothing, else an
    :class:`AttentionBackend`.

    Args:
        need: what the model asks for.
        wanted: the user's choice; any refusal is an error, there is no silent fallback.
        preferred: the platform's order; installed backends that it omits come last, by name.

    Raises:
        ConfigError: nobody can serve; lists each candidate with its reasons.
    """
    if wanted is not None:
        backend: type[BackendFacts] = plugins.load("headrace.attention_backends", wanted)
        reasons = backend.refuse(need)
        if reasons:
            raise ConfigError(
                f"attention backend {wanted!r} cannot serve {need}: {'; '.join(reasons)}; "
                f"could be {_who_serves(need)}",
                field="attention.backend",
            )
        return backend
    names = plugins.installed("headrace.attention_backends")
    order = [name for name in preferred if name in names]
    order += [name for name in names if name not in order]
    refusals: list[str] = []
    for name in order:
        backend = plugins.load("headrace.attention_backends", name)
        reasons = backend.refuse(need)
        if not reasons:
            logger.info("attention backend: %s", name)
            return backend
        refusals.append(f"{name}: {', '.join(reasons)}")
    listing = "; ".join(refusals) or "none is installed (pip install headrace-attention)"
    raise ConfigError(
        f"no attention backend can serve {need}. {listing}", field="attention.backend"
    )


class BackendChooser:
    """Chooses the backends of one model's layers; what is chosen once is one object.

    A user's choice holds for every layer whose type of attention the backend serves at all; others,
    such as an encoder's beside a cached decoder's, get what they would without it.

    Args:
        ops: what backends are made with.
        wanted, preferred: see :func:`choose_backend`.
    """

    def __init__(
        self, ops: OpTable, *, wanted: str | None = None, preferred: Sequence[str] = ()
    ) -> None:
        self._ops = ops
        self._wanted = wanted
        self._preferred = preferred
        self._chosen: dict[AttentionNeed, BackendFacts] = {}
        self._made: dict[type[BackendFacts], BackendFacts] = {}
        self._passed_over: list[AttentionNeed] = []

    def __call__(self, need: AttentionNeed) -> BackendFacts:
        """The backend for layers with this need.

        Raises:
            ConfigError: nobody can serve it, or not the one that the user has chosen.
        """
        if need not in self._chosen:
            backend = self._choose(need)
            self._chosen[need] = self._made.setdefault(backend, backend(self._ops))
        return self._chosen[need]

    def check_used(self) -> None:
        """To be called when all layers have been asked for.

        Raises:
            ConfigError: none of them is served by the one that the user has chosen.
        """
        if self._passed_over and len(self._passed_over) == len(self._chosen):
            choose_backend(self._passed_over[0], wanted=self._wanted)

    def _choose(self, need: AttentionNeed) -> type[BackendFacts]:
        if self._wanted is not None:
            wanted: type[BackendFacts] = plugins.load("headrace.attention_backends", self._wanted)
            if need.attention_type not in wanted.supported_attention_types:
                logger.info(
                    "attention backend %s: not for attention of type %s, which it does not serve",
                    self._wanted, need.attention_type,
                )  # fmt: skip
                self._passed_over.append(need)
                return choose_backend(need, preferred=self._preferred)
        return choose_backend(need, wanted=self._wanted, preferred=self._preferred)


def _who_serves(need: AttentionNeed) -> list[str]:
    """Names of installed backends that serve the need; one that cannot be imported serves nothing."""
    willing = []
    for name, plugin in plugins.installed("headrace.attention_backends").items():
        try:
            backend: type[BackendFacts] = plugin.load()
        except PluginError:
            continue
        if not backend.refuse(need):
            willing.append(name)
    return willing
