"""The paged cache as kernels see it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.ops.arguments import describe

_Geometry = ctypes.c_int64 * 13

STORAGE: Mapping[torch.dtype, int] = {
    torch.int8: 1,
    torch.float8_e4m3fn: 2,
    torch.float8_e5m2: 3,
}
"""Codes of the one-byte storages of a cache; 0 is the activations' own dtype."""


def beyond(op: str, cache: Tensor) -> str:
    return f"{op}: a slot is beyond the cache's {cache.shape[0]} blocks of {cache.shape[1]}"


def check_key_value(key: Tensor, value: Tensor, tokens: int) -> None:
    if key.shape != value.shape or key.dtype != value.dtype or key.shape[0] < tokens:
        raise ConfigError(
            f"key is {describe(key)} and value {describe(value)}; they must be alike and have "
            f"at least {tokens} rows"
        )


class Geometries:
    """Describes pairs of caches to the kernels: thirteen numbers each, see rotary_cache.h.

    An engine has a handful of cache shapes and asks for them in every layer of every step.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        dtype: torch.dtype,
        dim: int,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Any:
        shape, stored = key_cache.shape, key_cache.dtype
        name = (
            shape, key_cache.stride(), value_cache.stride(), stored, dtype, dim,
            0 if k_scale is None else k_scale.data_ptr(),
            0 if v_scale is None else v_scale.data_ptr(),
        )  # fmt: skip
        numbers = self._known.get(name)
        if numbers is not None and value_cache.dtype is stored and value_cache.shape == shape:
            if stored is not dtype:
                _check_scale(k_scale, stored, shape[2])
                _check_scale(v_scale, stored, shape[2])
            return numbers
        if (
            value_cache.shape != shape
            or value_cache.dtype is not stored
            or (stored is not dtype and stored not in STORAGE)
            or shape[3] != dim
        ):
            raise ConfigError(
                f"caches are {describe(key_cache)} and {describe(value_cache)}; they must be "
                f"alike, {dtype} or one of {list(STORAGE)}, with head_dim {dim}"
            )
        for scale in (k_scale, v_scale):
            _check_scale(scale, stored, shape[2])
        if len(self._known) >= 1024:
            self._known.clear()
        numbers = _Geometry(
            shape[0], shape[1], *name[1], *name[2], STORAGE.get(stored, 0), name[6], name[7]
        )
        self._known[name] = numbers
        return numbers


def _check_scale(scale: Tensor | None, stored: torch.dtype, kv_heads: int) -> None:
    if scale is None:
        return
    if stored not in STORAGE:
        raise ConfigError(f"a cache of {stored} takes no scales; caches of {list(STORAGE)} do")
    if scale.dtype is not torch.float32 or scale.shape != (kv_heads,) or not scale.is_contiguous():
        raise ConfigError(
            f"cache scale is {describe(scale)}; it must be float32 [{kv_heads}], contiguous"
        )
