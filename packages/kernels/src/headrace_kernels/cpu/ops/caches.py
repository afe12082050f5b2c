"""The paged cache as kernels see it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.ops.arguments import describe

_Geometry = ctypes.c_int64 * 10


def beyond(op: str, cache: Tensor) -> str:
    return f"{op}: a slot is beyond the cache's {cache.shape[0]} blocks of {cache.shape[1]}"


def check_key_value(key: Tensor, value: Tensor, tokens: int) -> None:
    if key.shape != value.shape or key.dtype != value.dtype or key.shape[0] < tokens:
        raise ConfigError(
            f"key is {describe(key)} and value {describe(value)}; they must be alike and have "
            f"at least {tokens} rows"
        )


class Geometries:
    """Describes pairs of caches to the kernels: ten numbers each, see rotary_cache.h.

    An engine has a handful of cache shapes and asks for them in every layer of every step.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype, dim: int) -> Any:
        shape, strides = key_cache.shape, key_cache.stride()
        if (
            value_cache.shape != shape
            or key_cache.dtype is not dtype
            or value_cache.dtype is not dtype
            or shape[3] != dim
        ):
            raise ConfigError(
                f"caches are {describe(key_cache)} and {describe(value_cache)}; they must be "
                f"alike, {dtype}, with head_dim {dim}"
            )
        name = (shape[0], shape[1], strides, value_cache.stride())
        numbers = self._known.get(name)
        if numbers is None:
            if len(self._known) >= 64:
                self._known.clear()
            numbers = _Geometry(shape[0], shape[1], *strides, *value_cache.stride())
            self._known[name] = numbers
        return numbers
