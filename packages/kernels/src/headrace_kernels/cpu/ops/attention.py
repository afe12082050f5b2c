"""Attention over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import BAD_LENGTHS, Library
from headrace_kernels.cpu.ops.arguments import describe, dtype_code, int32, unit_last, vector
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
        window = 0 if sliding_window is None else sliding_window
        out = torch.empty(tokens, q_heads, dim, dtype=query.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), sink_pointer,
            self._geometries.of(key_cache, value_cache, query.dtype, dim, k_scale, v_scale),
            tokens, requests, q_heads, kv_heads, dim, q_row, q_head, block_table.stride(0),
            block_table.shape[1], window, scale, soft_cap, dtype_code(query.dtype),
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
