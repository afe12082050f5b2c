"""Latent attention: one vector for each token is all heads' key and value; and the tokens to attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import BAD_LENGTHS, Library
from headrace_kernels.cpu.ops.arguments import (
    describe,
    dtype_code,
    int32,
    int64,
    matrix,
    partial_pointers,
    unit_last,
)
from headrace_kernels.cpu.ops.caches import STORAGE, check_row_scales, check_scale


class _Stored(NamedTuple):
    """How a cache holds its vectors, for the kernels."""

    code: int
    scale: int | None
    """Address of the one scale of a cache of one byte."""
    row_scales: int | None
    """Address of two scales for each token, if they have their own."""
    scale_strides: tuple[int, int]
    """Strides of ``row_scales`` from block to block and from token to token, in floats."""


def _stored(cache: Tensor, k_scale: Tensor | None, sizes: tuple[int, int], what: str) -> _Stored:
    """Checks k_scale against the cache; ``sizes`` are those of a latent and of a rope key.

    Raises:
        ConfigError: they do not fit.
    """
    if k_scale is None or k_scale.dim() != 3:
        check_scale(k_scale, cache.dtype, 1)
        scale = None if k_scale is None else k_scale.data_ptr()
        return _Stored(STORAGE.get(cache.dtype, 0), scale, None, (0, 0))
    code = check_row_scales(cache, k_scale, (*cache.shape[:2], 2), sum(sizes))
    if sizes[0] % 2 or k_scale.stride(2) != 1:
        raise ConfigError(
            f"{what}: a latent of {sizes[0]} numbers with scales {describe(k_scale)}: must be an even "
            "number, and the two scales side by side"
        )
    return _Stored(code, None, k_scale.data_ptr(), (k_scale.stride(0), k_scale.stride(1)))


def _fits(cache: Tensor, k_scale: Tensor | None, dtype: torch.dtype, width: int) -> bool:
    """True if a cache holds vectors of this dtype and width, as they are or in one byte. With scales for
    each token it is checked elsewhere."""
    if k_scale is not None and k_scale.dim() == 3:
        return True
    return cache.shape[2] == width and (cache.dtype is dtype or cache.dtype in STORAGE)


class MLACacheWrite:
    """See :class:`headrace_core.ops.MLACacheWriteOp`.

    Raises:
        IndexError: a slot is beyond the cache.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.latent_cache_write

    def __call__(
        self,
        latent: Tensor,
        rope_key: Tensor,
        cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
    ) -> None:
        slot_mapping = int64(slot_mapping)
        tokens = slot_mapping.shape[0]
        latent, latent_rows, latent_stride = matrix(latent)
        rope_key, rope_rows, rope_stride = matrix(rope_key)
        blocks, size, _ = cache.shape
        sizes = latent.shape[1], rope_key.shape[1]
        if (
            min(latent_rows, rope_rows) < tokens
            or latent.dtype is not rope_key.dtype
            or not _fits(cache, k_scale, latent.dtype, sum(sizes))
            or cache.stride(2) != 1
        ):
            raise ConfigError(
                f"mla_cache_write: latent is {describe(latent)}, rope_key {describe(rope_key)} for "
                f"{tokens} slots of a cache {describe(cache)}: must be of one dtype (or the cache of "
                "one byte), and together as wide as the cache, whose last dimension has unit stride"
            )
        stored = _stored(cache, k_scale, sizes, "mla_cache_write")
        status = self._kernel(
            latent.data_ptr(), rope_key.data_ptr(), cache.data_ptr(), slot_mapping.data_ptr(),
            stored.scale, stored.row_scales, tokens, *sizes, latent_stride, rope_stride, blocks, size,
            *cache.stride()[:2], *stored.scale_strides, stored.code, dtype_code(latent.dtype),
        )  # fmt: skip
        if status:
            raise IndexError(
                f"mla_cache_write: a slot is beyond the cache's {blocks} blocks of {size}"
            )


class MLAAttention:
    """See :class:`headrace_core.ops.MLAAttentionOp`.

    Raises:
        IndexError: a block table names a block that the cache does not have.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.latent_attention

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
        query, rope_query = unit_last(query), unit_last(rope_query)
        (tokens, heads, latent), (blocks, size, _) = query.shape, cache.shape
        requests, width = seq_lens.shape[0], latent + rope_query.shape[2]
        if (
            cu_seqlens_q.shape[0] != requests + 1
            or rope_query.shape[:2] != (tokens, heads)
            or query.dtype is not rope_query.dtype
            or not _fits(cache, k_scale, query.dtype, width)
            or cache.stride(2) != 1
        ):
            raise ConfigError(
                f"mla_attention: query is {describe(query)}, rope_query {describe(rope_query)}, "
                f"cache {describe(cache)}, cu_seqlens_q {describe(cu_seqlens_q)} for seq_lens "
                f"{describe(seq_lens)}: must be of one dtype, and queries together as wide as the cache"
            )
        stored = _stored(cache, k_scale, (latent, width - latent), "mla_attention")
        topk = 0
        if key_counts is not None and topk_indices is not None:
            raise ConfigError("mla_attention: key_counts cannot be combined with topk_indices")
        partial = partial_pointers(key_counts, lse, tokens, heads, "mla_attention")
        if topk_indices is not None:
            topk = self._topk_width(topk_indices, tokens, cache, stored.scale_strides)
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            block_table = block_table.contiguous()
        block_table, cu_seqlens_q = int32(block_table), int32(cu_seqlens_q)
        seq_lens = int32(seq_lens)
        out = torch.empty(tokens, heads, latent, dtype=query.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), rope_query.data_ptr(), cache.data_ptr(),
            block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr(),
            None if topk_indices is None else topk_indices.data_ptr(), *partial,
            stored.scale, stored.row_scales, tokens, requests, heads, width, latent,
            *query.stride()[:2], *rope_query.stride()[:2], blocks, size, *cache.stride()[:2],
            *stored.scale_strides, block_table.stride(0), block_table.shape[1], topk, scale,
            stored.code, dtype_code(query.dtype),
        )  # fmt: skip
        if status == BAD_LENGTHS:
            raise ConfigError(
                f"mla_attention: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise within the "
                f"{tokens} rows of query"
            )
        if status:
            raise IndexError(
                f"mla_attention: a block table names a block outside [0, {blocks}) "
                "or is too narrow for its seq_lens"
            )
        return out

    @staticmethod
    def _topk_width(
        topk_indices: Tensor, tokens: int, cache: Tensor, scale_strides: tuple[int, int]
    ) -> int:
        """Most tokens that were picked for one token."""
        rows, topk = topk_indices.shape
        if (
            rows != tokens
            or topk_indices.dtype is not torch.int32
            or not topk_indices.is_contiguous()
        ):
            raise ConfigError(
                f"mla_attention: topk_indices is {describe(topk_indices)} for {tokens} rows of query: must "
                "be contiguous, int32, a row for each"
            )
        apart, rest = divmod(cache.stride(0), cache.stride(1))
        if rest or scale_strides[0] != apart * scale_strides[1]:
            raise ConfigError(
                f"mla_attention: picked tokens of a cache whose blocks are {cache.stride(0)} apart: "
                f"must be a multiple of {cache.stride(1)}, what tokens are, and so must be scales'"
            )
        return topk


class IndexTokens:
    """See :class:`headrace_core.ops.optional.index_tokens.IndexTokensOp`.

    Raises:
        IndexError: a block table names a block that the cache does not have.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.index_tokens

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        top_k: int,
    ) -> Tensor:
        query, weights = unit_last(query), unit_last(weights)
        (tokens, heads, dim), (blocks, size, width) = query.shape, cache.shape
        requests = seq_lens.shape[0]
        if (
            cu_seqlens_q.shape[0] != requests + 1
            or weights.shape != (tokens, heads)
            or dim != width
            or not query.dtype == weights.dtype == cache.dtype
            or cache.stride(2) != 1
        ):
            raise ConfigError(
                f"index_tokens: query is {describe(query)}, weights {describe(weights)}, cache "
                f"{describe(cache)}, cu_seqlens_q {describe(cu_seqlens_q)} for seq_lens "
                f"{describe(seq_lens)}: must be of one dtype, and queries as wide as the cache"
            )
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            block_table = block_table.contiguous()
        block_table, cu_seqlens_q = int32(block_table), int32(cu_seqlens_q)
        seq_lens = int32(seq_lens)
        out = torch.empty(tokens, top_k, dtype=torch.int32)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), weights.data_ptr(), cache.data_ptr(),
            block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), tokens, requests,
            heads, dim, *query.stride()[:2], weights.stride(0), blocks, size, *cache.stride()[:2],
            block_table.stride(0), block_table.shape[1], top_k, dtype_code(query.dtype),
        )  # fmt: skip
        if status == BAD_LENGTHS:
            raise ConfigError(
                f"index_tokens: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise within the "
                f"{tokens} rows of query"
            )
        if status:
            raise IndexError(
                f"index_tokens: a block table names a block outside [0, {blocks}) "
                "or is too narrow for its seq_lens"
            )
        return out
