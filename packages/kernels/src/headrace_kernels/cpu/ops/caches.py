"""The paged cache as kernels see it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops.vnni import GROUP, is_vnni_packed
from headrace_kernels.cpu.library import VNNI_ISAS
from headrace_kernels.cpu.ops.arguments import describe

_Geometry = ctypes.c_int64 * 21

STORAGE: Mapping[torch.dtype, int] = {
    torch.int8: 1,
    torch.float8_e4m3fn: 2,
    torch.float8_e5m2: 3,
}
"""Codes of the one-byte storages of a cache; 0 is the activations' own dtype."""

INT4 = 6
"""Code of the storage of two numbers a byte (uint8), whose rows have scales."""

PAIRED = 4
"""Code of a cache in the order of :mod:`headrace_core.ops.vnni`."""


def beyond(op: str, cache: Tensor) -> str:
    blocks, size, _ = sizes(cache)
    return f"{op}: a slot is beyond the cache's {blocks} blocks of {size}"


def sizes(key_cache: Tensor) -> tuple[int, int, int]:
    """Blocks, tokens of a block and kv heads of plain or VNNI-packed keys."""
    if is_vnni_packed(key_cache):
        blocks, heads, groups = key_cache.shape[:3]
        return blocks, groups * GROUP, heads
    blocks, size, heads = key_cache.shape[:3]
    return blocks, size, heads


def check_key_value(key: Tensor, value: Tensor, tokens: int) -> None:
    if key.shape != value.shape or key.dtype != value.dtype or key.shape[0] < tokens:
        raise ConfigError(
            f"key is {describe(key)} and value {describe(value)}; they must be alike and have "
            f"at least {tokens} rows"
        )


class Geometries:
    """Describes pairs of caches to the kernels: 21 numbers each, see rotary_cache.h.

    Args:
        isa: of the library; VNNI-packed caches are for some only.

    An engine has a handful of cache shapes and asks for them in every layer of every step.
    """

    def __init__(self, isa: str) -> None:
        self._isa = isa
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
        if k_scale is not None and k_scale.dim() == 3:
            return self._of_rows(key_cache, value_cache, dtype, dim, k_scale, v_scale)
        shape, stored = key_cache.shape, key_cache.dtype
        name = (
            shape, key_cache.stride(), value_cache.stride(), stored, dtype, dim,
            0 if k_scale is None else k_scale.data_ptr(),
            0 if v_scale is None else v_scale.data_ptr(),
        )  # fmt: skip
        numbers = self._known.get(name)
        if is_vnni_packed(key_cache):
            return self._paired(name, key_cache, value_cache)
        if numbers is not None and value_cache.dtype is stored and value_cache.shape == shape:
            if stored is not dtype:
                check_scale(k_scale, stored, shape[2])
                check_scale(v_scale, stored, shape[2])
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
            check_scale(scale, stored, shape[2])
        return self._keep(
            name, shape[0], shape[1], *name[1], *name[2], STORAGE.get(stored, 0), name[6], name[7]
        )

    def _paired(self, name: Any, keys: Tensor, values: Tensor) -> Any:
        known = self._known.get((name, values.shape, values.dtype))
        if known is not None:
            return known
        blocks, size, heads = sizes(keys)
        dim, dtype = name[5], name[4]
        if (
            self._isa not in VNNI_ISAS
            or dtype is not torch.bfloat16
            or dim % GROUP
            or keys.shape != (blocks, heads, size // GROUP, dim // 2, GROUP, 2)
            or values.shape != (blocks, heads, size // 2, dim, 2)
            or keys.stride()[2:] != (GROUP * dim, 2 * GROUP, 2, 1)
            or values.stride()[2:] != (2 * dim, 2, 1)
            or not keys.dtype == values.dtype == dtype
            or name[6:] != (0, 0)
        ):
            raise ConfigError(
                f"VNNI-packed caches are {describe(keys)} and {describe(values)} for {dtype} and "
                f"head_dim {dim}; they must be of headrace_core.ops.vnni, bfloat16, head_dim a "
                f"multiple of {GROUP}, without scales, on one of {list(VNNI_ISAS)} (not {self._isa})"
            )
        key_strides = keys.stride(0), 0, keys.stride(1), 0
        value_strides = values.stride(0), 0, values.stride(1), 0
        whole_name = name, values.shape, values.dtype
        return self._keep(whole_name, blocks, size, *key_strides, *value_strides, PAIRED, 0, 0)

    def _of_rows(
        self,
        keys: Tensor,
        values: Tensor,
        dtype: torch.dtype,
        dim: int,
        k_scale: Tensor,
        v_scale: Tensor | None,
    ) -> Any:
        """Caches with a scale for each row."""
        parts = (keys, values, k_scale, k_scale if v_scale is None else v_scale)
        name = (dtype, dim, *((x.shape, x.stride(), x.dtype) for x in parts),
                k_scale.data_ptr(), 0 if v_scale is None else v_scale.data_ptr())  # fmt: skip
        known = self._known.get(name)
        if known is not None:
            return known
        if v_scale is None or values.shape != keys.shape or values.dtype is not keys.dtype:
            raise ConfigError(
                f"caches are {describe(keys)} and {describe(values)}; they must be alike, with scales "
                "for the rows of both or of none"
            )
        code = check_row_scales(keys, k_scale, keys.shape[:3], dim)
        check_row_scales(values, v_scale, keys.shape[:3], dim)
        return self._keep(
            name, *keys.shape[:2], *keys.stride(), *values.stride(), code, 0, 0,
            k_scale.data_ptr(), *k_scale.stride(), v_scale.data_ptr(), *v_scale.stride(),
        )  # fmt: skip

    def _keep(self, name: Any, *numbers: int) -> Any:
        if len(self._known) >= 1024:
            self._known.clear()
        self._known[name] = geometry = _Geometry(*numbers)
        return geometry


def check_row_scales(cache: Tensor, scales: Tensor, shape: tuple[int, ...], dim: int) -> int:
    """The code of a cache whose rows of ``dim`` numbers have scales of this shape.

    Raises:
        ConfigError: they do not.
    """
    widths = {torch.int8: (STORAGE[torch.int8], dim), torch.uint8: (INT4, dim // 2)}
    code, width = widths.get(cache.dtype, (0, 0))
    if (
        cache.shape[-1] != width
        or (code == INT4 and dim % 2)
        or cache.stride(-1) != 1
        or scales.dtype is not torch.float32
        or scales.shape != shape
    ):
        raise ConfigError(
            f"scales of rows are {describe(scales)} for a cache {describe(cache)} and head_dim {dim}: "
            f"they must be float32 {list(shape)}, the cache int8 [..., {dim}] or uint8 [..., {dim} / 2] "
            "with unit stride"
        )
    return code


def check_scale(scale: Tensor | None, stored: torch.dtype, kv_heads: int) -> None:
    """Raises: ConfigError: the scale of a cache that takes none, or one of another shape."""
    if scale is None:
        return
    if stored not in STORAGE:
        raise ConfigError(f"a cache of {stored} takes no scales; caches of {list(STORAGE)} do")
    if scale.dtype is not torch.float32 or scale.shape != (kv_heads,) or not scale.is_contiguous():
        raise ConfigError(
            f"cache scale is {describe(scale)}; it must be float32 [{kv_heads}], contiguous"
        )
