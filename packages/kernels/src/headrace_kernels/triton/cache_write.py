"""Keys and values of new tokens to their slots in the paged cache.

Token t of key and value [T', Hk, D] goes to ``cache[slot // S, slot % S]`` with
``slot = slot_mapping[t]``; negative slots are skipped. The number of tokens is that of
``slot_mapping``, so key and value may be padded (ATTN-RESHAPE-CACHE-FLASH). All strides are
arguments: any memory order of the cache is served, and strided slices of a fused projection need
no copy. If two tokens have one slot, which of them stays is undefined.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.triton.launch import padded

_LARGEST_BLOCK = 1024


@triton.jit
def _cache_write_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    block_size,
    num_values,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # 64 bits: slot * stride passes 2^31 in every cache that is worth having.
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = index < num_values
        head, dim = index // HEAD_DIM, index % HEAD_DIM
        block, offset = slot // block_size, slot % block_size
        key = tl.load(
            key_ptr + token * key_strides[0] + head * key_strides[1] + dim * key_strides[2],
            mask=inside,
        )
        value = tl.load(
            value_ptr + token * value_strides[0] + head * value_strides[1] + dim * value_strides[2],
            mask=inside,
        )
        key_at = block * key_cache_strides[0] + offset * key_cache_strides[1]
        value_at = block * value_cache_strides[0] + offset * value_cache_strides[1]
        # The store converts to the cache's dtype (float8 included).
        tl.store(
            key_cache_ptr + key_at + head * key_cache_strides[2] + dim * key_cache_strides[3],
            key.to(key_cache_ptr.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            value_cache_ptr
            + value_at
            + head * value_cache_strides[2]
            + dim * value_cache_strides[3],
            value.to(value_cache_ptr.dtype.element_ty),
            mask=inside,
        )


def refuse_one_byte(
    x: Tensor, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    """These kernels know caches of the activations' dtype only."""
    if cache.dtype is not x.dtype or k_scale is not None or v_scale is not None:
        raise ConfigError(
            f"triton kernels: a cache of {cache.dtype} for {x.dtype} is not supported; use "
            "kv_cache_dtype 'auto'",
            field="cache.kv_cache_dtype",
        )


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See :class:`headrace_core.ops.CacheWriteOp`. key and value may have more rows than slots.

    A cache of another dtype gets what the hardware's conversion makes of the values.

    Raises:
        ConfigError: there are scales.
    """
    if k_scale is not None or v_scale is not None:
        raise ConfigError(
            "triton kernels: caches with scales are not supported; use kv_cache_dtype 'auto'",
            field="cache.kv_cache_dtype",
        )
    num_tokens = slot_mapping.shape[0]
    _, num_kv_heads, head_dim = key.shape
    num_values = num_kv_heads * head_dim
    if not num_tokens:
        return
    block = min(_LARGEST_BLOCK, padded(num_values))
    _cache_write_kernel[(num_tokens, triton.cdiv(num_values, block))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(),
        value.stride(),
        key_cache.stride(),
        value_cache.stride(),
        key_cache.shape[1],
        num_values,
        HEAD_DIM=head_dim,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
    )
