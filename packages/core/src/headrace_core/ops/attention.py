"""Ops that rotate, write the cache and attend to it. Letters: :mod:`headrace_core.ops`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

CACHE_OPS = ("cache_write", "rotary_cache_write", "paged_attention")
"""The ops that touch the cache: they take VNNI-packed ones all, or none of them does."""
ONE_BYTE_CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""torch names of the dtypes that a cache may have besides the activations' own."""


class RotaryOp(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
    ) -> None:
        """Rotate query [T, Hq, D] and key [T, Hk, D] in place by their positions.

        cos_sin [P, R] float32: cosines in the first R/2 columns, sines in the rest; row p is
        position p. Only the first R of the D dimensions turn. Pairs are (i, i + R/2), or
        (2i, 2i + 1) if ``interleaved``. Source: Su et al. 2021, arXiv:2104.09864.
        """


class CacheWriteOp(Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Copy key, value [T, Hk, D] to their slots in caches [N, S, Hk, D] (any strides).

        slot_mapping [T] int64: ``block * S + offset``; negative entries are skipped, and so are
        rows of key and value past its end (padding).

        Caches have the dtype of key and value, or one of :data:`ONE_BYTE_CACHES`: then
        ``x / scale`` is stored, rounded to nearest even and clamped to the finite range. k_scale,
        v_scale [Hk] float32, greater than 0; None = 1. Other caches take none.

        With k_scale, v_scale [N, S, Hk] float32 (any strides) an int8 or uint8 cache has a scale for each
        row, the numbers of one token and head, which this op finds and *writes*: the row's largest finite
        magnitude / 127 (int8) or / 7 (uint8), 1 if that is 0. ``x / scale`` is rounded and clamped to
        that number; NaN is 0. A uint8 cache is [N, S, Hk, D / 2]: dimension 2 i is in the low half of
        byte i, 2 i + 1 in the high one, as two's complement.

        Providers that say so (:class:`PacksVNNI`) and the reference also take caches in the order
        of :mod:`headrace_core.ops.vnni`, which is told by the number of dimensions.
        """


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm over each head's D values, of query and key before rotation (Qwen3, Gemma 3)."""

    query_weight: Tensor
    """[D]."""
    key_weight: Tensor
    """[D]."""
    eps: float
    offset: float = 0.0


class RotaryCacheWriteOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        interleaved: bool = False,
        head_norm: HeadNorm | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Head norm (if given), rotation (if ``cos_sin``), cache write, in that order, in one pass.

        Shapes as :class:`RotaryOp` and :class:`CacheWriteOp`; query, key and value may be
        strided slices of one fused projection. query is changed in place; key may be (its
        content afterwards is unspecified), value is not.
        """


class VarlenAttentionOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        scale: float,
        sliding_window: int | None = None,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
        **extras: Any,
    ) -> Tensor:
        """Attention in both directions within each of several sequences, without a cache.

        query [T, Hq, D], key and value [T, Hk, D], all may be strided slices of one fused projection;
        cu_seqlens [B + 1] int32, max_seqlen the longest sequence. Returns [T, Hq, D], contiguous; rows
        past ``cu_seqlens[-1]`` are 0.

        Query head h reads kv head ``h // (Hq // Hk)``. Token i sees token j of the same sequence, and
        with a window W only if ``|i - j| < W`` (None or not positive: unlimited). distance_bias
        [Hq, 2 P - 1] float32 with P >= max_seqlen is added to the scaled (and capped) score: entry
        ``P - 1 + j - i`` (T5's and MPNet's relative positions, ALiBi in both directions). Of the extras of
        :class:`PagedAttentionOp` there is ``soft_cap``. Of sequence b only the first ``key_lens[b]``
        tokens are seen (key_lens [B] int32, 0 to the sequence's length; None: all): the others ask
        and are not asked, as the fillers of ColBERT's queries do (arXiv:2004.12832). A row that sees
        nothing is 0.

        Raises:
            ConfigError: shapes that do not fit, a sequence longer than distance_bias is for, more keys
                than tokens (where lengths are read on the host).
        """


class PagedAttentionOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        sliding_window: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        causal: bool = True,
        **extras: Any,
    ) -> Tensor:
        """Attention of new tokens over the paged cache: prefill, decode and mixed alike.

        query [T, Hq, D] (may be a strided slice); caches [N, S, Hk, D], any strides, already
        holding this step's keys and values; block_table [B, M] int32; cu_seqlens_q [B + 1] int32;
        seq_lens [B] int32, including the new tokens. Returns [T, Hq, D], contiguous.

        Query head h reads kv head ``h // (Hq // Hk)``. Request b's new token i stands at
        ``p = seq_lens[b] - q_len + i`` and sees keys j <= p, and with a window W only
        ``p - j < W``. With ``causal`` False it sees all ``seq_lens[b]`` keys, which need not be its
        own tokens' (cross-attention); there is no window then. A row that sees nothing is 0, and so are
        rows past ``cu_seqlens_q[-1]``. A window that is None or not positive is unlimited. Caches (plain
        or VNNI-packed), k_scale and v_scale are those of :class:`CacheWriteOp`: a stored x stands for
        ``x * scale``. Definition: ATTN-REF of the specification.

        Extras, for few models each; backends hand on those of
        :class:`~headrace_core.attention.AttentionLayerSpec`, and an implementation may have others:

        * ``soft_cap`` t > 0 maps scores s to ``t * tanh(s / t)``;
        * ``sinks`` [Hq], in query's dtype or float32: logits that enter the softmax's denominator only;
        * ``attention_chunk`` C: keys ``C * (p // C) <= j <= p`` are seen;
        * ``alibi_slopes`` [Hq] float32: ``slope_h * (j - p)`` is added to the scaled (and capped) score,
          with ``alibi_sqrt`` ``-slope_h * sqrt(p - j)`` (Press et al. 2021, arXiv:2108.12409; Step 1);
        * ``logit_scale`` [P] float32, P more than any position: the scaled (and capped) scores of the
          query at p are multiplied by entry p (Grok 2);
        * ``kv_prefix_key``, ``kv_prefix_value`` [S, Hk, D] in query's dtype: learned keys and values that
          every row sees besides, wherever it stands (openPangu Pro);
        * ``last_keys`` [T] int32: a row also sees the keys j from p to its entry (less than ``seq_lens[b]``)
          whose own rows' entries are no less: tokens of images see later ones, text between does not;
        * ``key_counts`` [T] int32: row t sees the first ``key_counts[t]`` of its request's keys, wherever
          it stands (a rank that keeps some of the keys; decision 141);
        * ``lse`` [T, Hq] float32, contiguous: is given each row's log-sum-exp; -inf if it sees nothing.

        Raises:
            ConfigError: a window, a chunk, slopes, a logit scale or last keys without ``causal``; a window
                and a chunk; last keys and a chunk; slopes and a logit scale; a KV prefix with a soft cap,
                slopes or a logit scale; key counts with anything that goes by positions.
            TypeError: an extra that the implementation does not have.
        """


def check_kv_prefix(
    query: Tensor,
    kv_prefix_key: Tensor | None,
    kv_prefix_value: Tensor | None,
    *,
    num_kv_heads: int,
    soft_cap: float,
    alibi: bool,
    logit_scale: bool,
) -> None:
    """Check a learned KV prefix as :class:`PagedAttentionOp` takes it.

    Raises:
        ConfigError: see there; or one without the other, or of another shape or dtype.
    """
    if kv_prefix_key is None and kv_prefix_value is None:
        return
    good = kv_prefix_key is not None and kv_prefix_value is not None
    if kv_prefix_key is not None and kv_prefix_value is not None:
        shape = (kv_prefix_key.shape[0], num_kv_heads, query.shape[-1])
        good = kv_prefix_key.shape == kv_prefix_value.shape == shape
        good = good and kv_prefix_key.dtype == kv_prefix_value.dtype == query.dtype
    if not good:
        raise ConfigError(
            "paged_attention: kv_prefix_key and kv_prefix_value must both be [S, "
            f"{num_kv_heads}, {query.shape[-1]}] of {query.dtype}, or both None"
        )
    if soft_cap > 0 or alibi or logit_scale:
        raise ConfigError("paged_attention: a KV prefix has no soft cap, ALiBi or logit_scale")


def check_mask(
    *,
    causal: bool,
    sliding_window: int | None,
    attention_chunk: int | None,
    alibi: bool,
    alibi_sqrt: bool = False,
    logit_scale: bool = False,
    last_keys: bool = False,
    key_counts: bool = False,
) -> None:
    """Check that no options of :class:`PagedAttentionOp` exclude each other.

    Raises:
        ConfigError: see there; or a chunk of less than one token, or roots that no slope weighs.
    """
    windowed = sliding_window is not None and sliding_window > 0
    if not causal and windowed:
        raise ConfigError(f"paged_attention: sliding_window = {sliding_window} without causal")
    if not causal and (attention_chunk is not None or alibi):
        raise ConfigError("paged_attention: attention_chunk and alibi_slopes need causal")
    if alibi_sqrt and not alibi:
        raise ConfigError("paged_attention: alibi_sqrt = True without alibi_slopes")
    if last_keys and (not causal or attention_chunk is not None):
        raise ConfigError("paged_attention: last_keys need causal, and no attention_chunk")
    if logit_scale and (alibi or not causal):
        raise ConfigError("paged_attention: logit_scale need causal, and no alibi_slopes")
    by_positions = windowed or attention_chunk is not None or alibi or logit_scale or last_keys
    if key_counts and (by_positions or not causal):
        raise ConfigError("paged_attention: key_counts need causal, and nothing by positions")
    if attention_chunk is not None and (windowed or attention_chunk < 1):
        raise ConfigError(
            f"paged_attention: attention_chunk = {attention_chunk} with sliding_window = "
            f"{sliding_window}: a chunk has at least one token and cannot be combined with a window"
        )


class MLACacheWriteOp(Protocol):
    def __call__(
        self,
        latent: Tensor,
        rope_key: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
    ) -> None:
        """Copy latent [T, R] and rope_key [T, P], joined, to their slots in cache [N, S, R + P].

        slot_mapping, and caches of one byte, as :class:`CacheWriteOp`; k_scale [1]. latent and rope_key
        may have rows that lie apart.

        With k_scale [N, S, 2] latent and rope key have a scale each, found and written as there; R is even.
        """


class MLAAttentionOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        rope_query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        topk_indices: Tensor | None = None,
        k_scale: Tensor | None = None,
        key_counts: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of all heads to one vector for each token, absorbed form of MLA.

        query [T, Hq, R] and rope_query [T, Hq, P] (both may be strided slices) together ask whole
        vectors of cache [N, S, R + P]; the value is a vector's first R entries. The rest as
        :class:`PagedAttentionOp`, its ``key_counts`` (without topk_indices) and ``lse`` too; caches and
        k_scale as :class:`MLACacheWriteOp`. Returns [T, Hq, R], contiguous. Source: DeepSeek-AI 2024,
        arXiv:2405.04434.

        topk_indices [T, k] int32: a token sees these positions of its request and no others. They rise along
        a row and are none after the token's own; behind them stands -1. None: all up to its own.
        """
