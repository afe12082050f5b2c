"""``sdpa``: torch's scaled_dot_product_attention, one call per request.

A plain second implementation of the contracts, with a cache and without: each request's keys and
values are gathered from the cache into a dense tensor and handed to torch. It costs a copy of the
whole context per layer and a Python loop over requests, so it is for small batches, for machines
without our kernels, and for checking the others. torch's function has no soft cap and no sinks; both
are refused.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace_attention.metadata import PagedMetadata
from headrace_attention.writing import store
from headrace_core.attention import (
    ALIBI,
    ALIBI_SQRT,
    ATTENTION_TYPES,
    CHUNKS,
    SLIDING_WINDOW,
    AttentionBackend,
    AttentionLayerSpec,
    EncoderBackend,
    KVViews,
)
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


_EXTRAS = frozenset({"attention_chunk", "alibi_slopes", "alibi_sqrt"})
"""The extras of a layer that it serves, by their names in the op."""


@dataclass(frozen=True, slots=True)
class SDPAMetadata:
    """The paged metadata and its host copies, so that layers do not wait for the device."""

    paged: PagedMetadata
    query_starts: list[int]
    """B + 1 row numbers."""
    seq_lens: list[int]
    """B numbers of keys, this step's included."""


class SDPABackend(AttentionBackend, EncoderBackend):
    """Attention through torch's scaled_dot_product_attention over gathered keys and values."""

    name: ClassVar[str] = "sdpa"
    supported_devices = ("cpu", "cuda")
    supported_attention_types = ATTENTION_TYPES
    supported_features = frozenset({SLIDING_WINDOW, CHUNKS, ALIBI, ALIBI_SQRT})

    def prepare(self, batch: ForwardBatch, group: int) -> SDPAMetadata:
        paged = PagedMetadata.of(batch, group)
        return SDPAMetadata(paged, paged.cu_seqlens_q.tolist(), paged.seq_lens.tolist())

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: SDPAMetadata | None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.AttentionBackend.forward`.

        Raises:
            ConfigError: the layer has extras of a feature that :meth:`refuse` would have refused.
        """
        _check_layer(layer)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if kv_cache is None or metadata is None:
            return output
        caches = self.views(kv_cache)
        store(self.ops, layer, key, value, caches, metadata.paged.slot_mapping)
        starts = metadata.query_starts
        for request, seq_len in enumerate(metadata.seq_lens):
            rows = slice(starts[request], starts[request + 1])
            if rows.start < rows.stop and seq_len > 0:
                blocks = metadata.paged.block_table[request]
                output[rows] = _attend_cached(layer, query[rows], caches, blocks, seq_len)
        return output

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
        """See :meth:`headrace_core.attention.EncoderBackend.attend`.

        Raises:
            ConfigError: as :meth:`forward`.
        """
        _check_layer(layer)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        starts, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
        seen = lengths if key_lens is None else key_lens.tolist()
        for start, length, num_keys in zip(starts, lengths, seen):
            if num_keys > 0:
                rows, keys = slice(start, start + length), slice(start, start + num_keys)
                mask = _mask_both_ways(layer, length, num_keys, query, distance_bias)
                output[rows] = _attend(layer, query[rows], key[keys], value[keys], mask)
        return output


def _check_layer(layer: AttentionLayerSpec) -> None:
    unknown = sorted(layer.extras.keys() - _EXTRAS)
    if unknown:
        raise ConfigError(
            f"layer {layer.name!r} sets {', '.join(unknown)}, which attention backend 'sdpa' does not "
            "support; use 'paged'",
            field="attention.backend",
        )


def _attend_cached(
    layer: AttentionLayerSpec, query: Tensor, caches: KVViews, blocks: Tensor, seq_len: int
) -> Tensor:
    """One request: query [q, Hq, D], its row of the block table [M] -> [q, Hq, D]."""
    causal = layer.attention_type != "encoder_decoder"
    # Keys before all that the first query sees are left out, not masked: their blocks may have been
    # given back, and whatever stands in the null block now (NaN included) must not be multiplied.
    first = _first_seen(layer, seq_len - query.shape[0])
    return _attend(
        layer,
        query,
        _gather(caches.key_cache, blocks, first, seq_len),
        _gather(caches.value_cache, blocks, first, seq_len),
        _causal_mask(layer, query, first, seq_len) if causal else None,
    )


def _attend(
    layer: AttentionLayerSpec, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """One sequence: [q, Hq, D], [L, Hk, D], a mask that fits [Hq, q, L] or None -> [q, Hq, D]."""
    result = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return result[0].transpose(0, 1)


def _mask_both_ways(
    layer: AttentionLayerSpec,
    length: int,
    num_keys: int,
    query: Tensor,
    distance_bias: Tensor | None,
) -> Tensor | None:
    """Mask that is added to scores (or, as bool, keeps them) [.., length, num_keys]; None if all keys are
    seen as
    they are."""
    window = layer.sliding_window
    reach = length if window is None or window <= 0 else min(window, length)
    if distance_bias is None and reach == length:
        return None
    at = torch.arange(length, device=query.device)
    distance = at[None, :num_keys] - at[:, None]
    seen = distance.abs() < reach
    if distance_bias is None:
        return seen
    middle = (distance_bias.shape[1] - 1) // 2
    bias = distance_bias[:, middle + distance].masked_fill(~seen, -torch.inf)
    return bias.to(query.dtype)[None]


def _gather(cache: Tensor, blocks: Tensor, first: int, seq_len: int) -> Tensor:
    """A request's tokens ``first`` to ``seq_len``: cache [N, S, Hk, D] -> [seq_len - first, Hk, D]."""
    tokens = torch.arange(first, seq_len, device=cache.device)
    block_size = cache.shape[1]
    return cache[blocks[tokens // block_size].long(), tokens % block_size]


def _first_seen(layer: AttentionLayerSpec, position: int) -> int:
    """The first key that a query at a position sees."""
    chunk, window = _chunk(layer), layer.sliding_window
    if chunk is not None:
        return max(0, position) // chunk * chunk
    return 0 if window is None or window <= 0 else max(0, position - window + 1)


def _chunk(layer: AttentionLayerSpec) -> int | None:
    chunk = layer.extras.get("attention_chunk")
    return None if chunk is None else int(chunk)


def _causal_mask(layer: AttentionLayerSpec, query: Tensor, first: int, seq_len: int) -> Tensor:
    """Where a query may look (ATTN-REF 3): [q, seq_len - first] bool, or with slopes [Hq, ...] of
    query's dtype, to be added to scores."""
    device, window, chunk = query.device, layer.sliding_window, _chunk(layer)
    position = torch.arange(seq_len - query.shape[0], seq_len, device=device)[:, None]
    key = torch.arange(first, seq_len, device=device)[None]
    mask = key <= position
    if window is not None and window > 0:
        mask &= position - key < window
    if chunk is not None:
        mask &= position // chunk == key // chunk
    slopes = layer.extras.get("alibi_slopes")
    if not isinstance(slopes, torch.Tensor):
        return mask
    distance = position - key
    if layer.extras.get("alibi_sqrt"):
        distance = distance.clamp(min=0).sqrt()
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(~mask, -torch.inf).to(query.dtype)
