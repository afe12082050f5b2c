"""Rotary embedding, cache write, and both in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import HeadNorm
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import describe, dtype_code, int64, unit_last, vector
from headrace_kernels.cpu.ops.caches import Geometries, beyond, check_key_value
from headrace_kernels.cpu.ops.norms import norm_weight


class Rotary:
    """See :class:`headrace_core.ops.RotaryOp`.

    Raises:
        IndexError: a position is outside the table.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.rotary

    def __call__(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
    ) -> None:
        tokens, q_heads, dim = query.shape
        q_row, q_head, q_dim = query.stride()
        k_row, k_head, k_dim = key.stride()
        if (q_dim != 1 or k_dim != 1) and dim > 1:
            raise ConfigError("rotary: query and key must have unit stride in their last dimension")
        if key.dtype != query.dtype or key.shape[0] != tokens or key.shape[2] != dim:
            raise ConfigError(f"rotary: query is {describe(query)}, key is {describe(key)}")
        check_rotation(cos_sin, positions, tokens, dim)
        positions = int64(positions)
        status = self._kernel(
            query.data_ptr(), key.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens,
            q_heads, key.shape[1], dim, q_row, q_head, k_row, k_head, cos_sin.shape[0],
            cos_sin.shape[1], cos_sin.stride(0), interleaved, dtype_code(query.dtype),
        )  # fmt: skip
        if status:
            raise IndexError(f"rotary: a position is outside [0, {cos_sin.shape[0]})")


class CacheWrite:
    """See :class:`headrace_core.ops.CacheWriteOp`.

    Raises:
        IndexError: a slot is beyond the cache.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.cache_write
        self._geometries = Geometries(library.isa)

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
        key, value = unit_last(key), unit_last(value)
        k_row, k_head, _ = key.stride()
        v_row, v_head, _ = value.stride()
        slot_mapping = int64(slot_mapping)
        tokens = slot_mapping.shape[0]
        check_key_value(key, value, tokens)
        _, kv_heads, dim = key.shape
        geometry = self._geometries.of(key_cache, value_cache, key.dtype, dim, k_scale, v_scale)
        status = self._kernel(
            key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            slot_mapping.data_ptr(), geometry, tokens, kv_heads, dim, k_row, k_head, v_row, v_head,
            dtype_code(key.dtype),
        )  # fmt: skip
        if status:
            raise IndexError(beyond("cache_write", key_cache))


class RotaryCacheWrite:
    """See :class:`headrace_core.ops.RotaryCacheWriteOp`; the bits of its parts done one by one.

    Raises:
        IndexError: a slot is beyond the cache or a position beyond the table.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.rotary_cache_write
        self._geometries = Geometries(library.isa)

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
        tokens, q_heads, dim = query.shape
        q_row, q_head, q_dim = query.stride()
        if q_dim != 1 and dim > 1:
            raise ConfigError("rotary_cache_write: query must have unit stride in D")
        key, value = unit_last(key), unit_last(value)
        k_row, k_head, _ = key.stride()
        v_row, v_head, _ = value.stride()
        dtype = query.dtype
        check_key_value(key, value, tokens)
        if key.dtype != dtype or key.shape[2] != dim or slot_mapping.shape[0] != tokens:
            raise ConfigError(
                f"rotary_cache_write: query is {describe(query)}, key is {describe(key)}, "
                f"slot_mapping is {describe(slot_mapping)}"
            )
        slot_mapping, positions = int64(slot_mapping), int64(positions)
        table, num_positions, rotary_dim, table_stride = None, 0, 0, 0
        if cos_sin is not None:
            check_rotation(cos_sin, positions, tokens, dim)
            table, table_stride = cos_sin.data_ptr(), cos_sin.stride(0)
            num_positions, rotary_dim = cos_sin.shape
        q_weight = k_weight = None
        eps = offset = 0.0
        code = weight_code = dtype_code(dtype)
        if head_norm is not None:
            eps, offset = head_norm.eps, head_norm.offset
            q_tensor, weight_code = norm_weight(head_norm.query_weight, dtype, dim)
            k_tensor = vector(head_norm.key_weight, q_tensor.dtype, dim, "head_norm: key_weight")
            q_weight, k_weight = q_tensor.data_ptr(), k_tensor.data_ptr()
        status = self._kernel(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), positions.data_ptr(), table,
            key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
            self._geometries.of(key_cache, value_cache, dtype, dim, k_scale, v_scale),
            q_weight, k_weight, tokens, q_heads, key.shape[1], dim, q_row, q_head, k_row, k_head,
            v_row, v_head, num_positions, rotary_dim, table_stride, eps, offset, interleaved,
            code, weight_code,
        )  # fmt: skip
        if status:
            raise IndexError(
                f"{beyond('rotary_cache_write', key_cache)}, or a position outside "
                f"[0, {num_positions})"
            )


def check_rotation(cos_sin: Tensor, positions: Tensor, tokens: int, dim: int) -> None:
    if (
        cos_sin.dtype is not torch.float32
        or cos_sin.stride(1) != 1
        or cos_sin.shape[1] > dim
        or cos_sin.shape[1] % 2
        or positions.shape != (tokens,)
    ):
        raise ConfigError(
            f"cos_sin is {describe(cos_sin)} and positions {describe(positions)}; they must be "
            f"float32 [P, R] with even R <= {dim} and unit stride, and [{tokens}]"
        )
