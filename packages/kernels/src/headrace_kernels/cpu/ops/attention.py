"""Attention: over the paged cache, and without one."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import check_kv_prefix, check_mask
from headrace_kernels.cpu.library import BAD_LENGTHS, Library
from headrace_kernels.cpu.ops.arguments import (
    describe,
    dtype_code,
    int32,
    partial_pointers,
    unit_last,
    vector,
)
from headrace_kernels.cpu.ops.caches import Geometries, sizes


class PagedAttention:
    """See :class:`headrace_core.ops.PagedAttentionOp`.

    Raises:
        IndexError: a block table names a block that the cache does not have.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.paged_attention
        self._geometries = Geometries(library.isa)

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
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        causal: bool = True,
        attention_chunk: int | None = None,
        alibi_slopes: Tensor | None = None,
        alibi_sqrt: bool = False,
        kv_prefix_key: Tensor | None = None,
        kv_prefix_value: Tensor | None = None,
        logit_scale: Tensor | None = None,
        last_keys: Tensor | None = None,
        key_counts: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        query = unit_last(query)
        tokens, q_heads, dim = query.shape
        q_row, q_head, _ = query.stride()
        (blocks, _, kv_heads), requests = sizes(key_cache), seq_lens.shape[0]
        if q_heads % kv_heads or cu_seqlens_q.shape[0] != requests + 1:
            raise ConfigError(
                f"paged_attention: {q_heads} query heads for {kv_heads} kv heads, cu_seqlens_q "
                f"{describe(cu_seqlens_q)} for seq_lens {describe(seq_lens)}"
            )
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            block_table = block_table.contiguous()
        block_table, cu_seqlens_q = int32(block_table), int32(cu_seqlens_q)
        seq_lens = int32(seq_lens)
        sink_pointer = None
        if sinks is not None:
            sinks = vector(sinks.float(), torch.float32, q_heads, "paged_attention: sinks")
            sink_pointer = sinks.data_ptr()
        slope_pointer = None
        if alibi_slopes is not None:
            name = "paged_attention: alibi_slopes"
            alibi_slopes = vector(alibi_slopes, torch.float32, q_heads, name)
            slope_pointer = alibi_slopes.data_ptr()
        logit_scale_pointer, num_positions = None, 0
        if logit_scale is not None:
            num_positions = max(1, logit_scale.shape[0])
            name = "paged_attention: logit_scale"
            logit_scale = vector(logit_scale, torch.float32, num_positions, name)
            logit_scale_pointer = logit_scale.data_ptr()
        window = 0 if sliding_window is None else max(0, sliding_window)
        check_mask(
            causal=causal,
            sliding_window=window,
            attention_chunk=attention_chunk,
            alibi=alibi_slopes is not None,
            alibi_sqrt=alibi_sqrt,
            logit_scale=logit_scale is not None,
            last_keys=last_keys is not None,
            key_counts=key_counts is not None,
        )
        check_kv_prefix(
            query, kv_prefix_key, kv_prefix_value, num_kv_heads=kv_heads, soft_cap=soft_cap,
            alibi=alibi_slopes is not None, logit_scale=logit_scale is not None,
        )  # fmt: skip
        prefix: tuple[Tensor, ...] = ()
        if kv_prefix_key is not None and kv_prefix_value is not None:
            prefix = (kv_prefix_key.contiguous(), kv_prefix_value.contiguous())
        prefix_pointers: list[int | None] = [x.data_ptr() for x in prefix] or [None, None]
        last_pointer = None
        if last_keys is not None:
            last_keys = vector(last_keys, torch.int32, tokens, "paged_attention: last_keys")
            last_pointer = last_keys.data_ptr()
        partial = partial_pointers(key_counts, lse, tokens, q_heads, "paged_attention")
        out = torch.empty(tokens, q_heads, dim, dtype=query.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), sink_pointer,
            slope_pointer, logit_scale_pointer, *prefix_pointers, last_pointer, *partial,
            self._geometries.of(key_cache, value_cache, query.dtype, dim, k_scale, v_scale),
            tokens, requests, q_heads, kv_heads, dim, q_row, q_head, block_table.stride(0),
            block_table.shape[1], window, attention_chunk or 0, num_positions,
            prefix[0].shape[0] if prefix else 0, scale, soft_cap, causal, int(alibi_sqrt),
            dtype_code(query.dtype),
        )  # fmt: skip
        if status == BAD_LENGTHS:
            raise ConfigError(
                f"paged_attention: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise within the "
                f"{tokens} rows of query"
            )
        if status:
            raise IndexError(
                f"paged_attention: a block table names a block outside [0, {blocks}) "
                "or is too narrow for its seq_lens"
            )
        return out


class VarlenAttention:
    """See :class:`headrace_core.ops.VarlenAttentionOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.varlen_attention

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
        soft_cap: float = 0.0,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
    ) -> Tensor:
        query, key, value = unit_last(query), unit_last(key), unit_last(value)
        (tokens, q_heads, dim), kv_heads = query.shape, key.shape[1]
        if q_heads % kv_heads or any(
            x.shape != (tokens, kv_heads, dim) or x.dtype is not query.dtype for x in (key, value)
        ):
            raise ConfigError(
                f"varlen_attention: query {describe(query)}, key {describe(key)}, value "
                f"{describe(value)}: must be [T, Hq, D] and twice [T, Hk, D], of one dtype, Hq a "
                "multiple of Hk"
            )
        cu_seqlens = int32(cu_seqlens).contiguous()
        num_seqs = cu_seqlens.shape[0] - 1
        lens = None if key_lens is None else _key_lens(key_lens, num_seqs)
        bias, reach = _bias_for(distance_bias, q_heads)
        out = torch.empty(tokens, q_heads, dim, dtype=query.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(),
            cu_seqlens.data_ptr(), None if lens is None else lens.data_ptr(),
            None if bias is None else bias.data_ptr(),
            tokens, num_seqs, q_heads, kv_heads, dim, *query.stride()[:2],
            *key.stride()[:2], *value.stride()[:2], reach,
            0 if sliding_window is None else sliding_window, scale, soft_cap,
            dtype_code(query.dtype),
        )  # fmt: skip
        if status:
            raise ConfigError(
                f"varlen_attention: cu_seqlens {cu_seqlens.tolist()} does not rise within the "
                f"{tokens} rows of query, a sequence is longer than distance_bias reaches "
                f"({reach} tokens), or key_lens {None if lens is None else lens.tolist()} are not "
                "within the sequences"
            )
        return out


def _key_lens(key_lens: Tensor, num_seqs: int) -> Tensor:
    if key_lens.shape != (num_seqs,):
        raise ConfigError(
            f"varlen_attention: key_lens is {describe(key_lens)}; it must be int32 [{num_seqs}]"
        )
    return int32(key_lens).contiguous()


def _bias_for(bias: Tensor | None, q_heads: int) -> tuple[Tensor | None, int]:
    """distance_bias [Hq, 2 P - 1] as the kernel reads it, and P."""
    if bias is None:
        return None, 0
    if bias.dtype is not torch.float32 or bias.shape[0] != q_heads or bias.shape[1] % 2 == 0:
        raise ConfigError(
            f"varlen_attention: distance_bias is {describe(bias)}; it must be float32 "
            f"[{q_heads}, 2 P - 1]"
        )
    return bias.contiguous(), (bias.shape[1] + 1) // 2
