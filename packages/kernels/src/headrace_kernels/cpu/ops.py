"""The ops of :mod:`headrace_core.ops` on the native library.

Each class is one op, bound to the kernels of one instruction set. A call checks what memory safety
needs and nothing else: a decode step makes hundreds of calls, so every microsecond here counts.
Layouts that a kernel cannot read in place are made contiguous first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import ACTIVATIONS, HeadNorm, PackedLinear
from headrace_kernels.cpu.library import BAD_LENGTHS, DTYPES, Library

_CODES: Mapping[torch.dtype, int] = {getattr(torch, name): code for name, code in DTYPES.items()}
_NAMES: Mapping[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
_KINDS: Mapping[str, int] = {name: code for code, name in enumerate(ACTIVATIONS)}

_Geometry = ctypes.c_int64 * 10
_empty = torch.empty


def native_ops(library: Library) -> dict[str, Any]:
    """Op name -> implementation, all ops."""
    return {
        "embedding": Embedding(library),
        "rms_norm": RMSNorm(library),
        "add_rms_norm": AddRMSNorm(library),
        "layer_norm": LayerNorm(library),
        "activation": Activation(library),
        "activation_and_mul": ActivationAndMul(library),
        "rotary": Rotary(library),
        "cache_write": CacheWrite(library),
        "rotary_cache_write": RotaryCacheWrite(library),
        "paged_attention": PagedAttention(library),
        "linear": Linear(library),
        "int8_linear": Int8Linear(library),
        "moe": MoE(library),
    }


class Embedding:
    """See :class:`headrace_core.ops.EmbeddingOp`.

    Raises:
        IndexError: an id is outside [0, V).
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.embedding

    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor:
        ids = _int64(ids)
        rows, (size, width) = ids.shape[0], weight.shape
        item = weight.element_size()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        out = _empty(rows, width, dtype=weight.dtype)
        status = self._kernel(
            out.data_ptr(), ids.data_ptr(), weight.data_ptr(),
            width * item, weight.stride(0) * item, rows, size,
        )  # fmt: skip
        if status:
            raise IndexError(f"embedding: an id is outside [0, {size})")
        return out


class RMSNorm:
    """See :class:`headrace_core.ops.RMSNormOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.rms_norm

    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        dtype, shape = x.dtype, x.shape
        width = shape[-1]
        x, rows, inner, outer_stride, inner_stride = _rows(x)
        weight, weight_code = _weight_like(weight, dtype, width)
        out = _empty(*shape, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, width, inner,
            outer_stride, inner_stride, eps, offset, _code(dtype), weight_code,
        )  # fmt: skip
        return out


class AddRMSNorm:
    """See :class:`headrace_core.ops.AddRMSNormOp`; both results reuse the inputs' memory."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.add_rms_norm

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        dtype, (rows, width) = x.dtype, x.shape
        if residual.shape != x.shape or residual.dtype != dtype:
            raise ConfigError(
                f"add_rms_norm: residual is {_describe(residual)}, x is {_describe(x)}"
            )
        x, residual = x.contiguous(), residual.contiguous()
        weight, weight_code = _weight_like(weight, dtype, width)
        pointer = x.data_ptr()
        self._kernel(
            pointer, pointer, residual.data_ptr(), weight.data_ptr(), rows, width, eps, offset,
            _code(dtype), weight_code,
        )  # fmt: skip
        return x, residual


class LayerNorm:
    """See :class:`headrace_core.ops.LayerNormOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.layer_norm

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        dtype, shape = x.dtype, x.shape
        width = shape[-1]
        x, rows, inner, outer_stride, inner_stride = _rows(x)
        weight, weight_code = _weight_like(weight, dtype, width)
        if bias is not None:
            bias = _vector(bias, weight.dtype, width, "layer_norm: bias")
        out = _empty(*shape, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), rows, width, inner, outer_stride,
            inner_stride, eps, _code(dtype), weight_code,
        )  # fmt: skip
        return out


class Activation:
    """See :class:`headrace_core.ops.ActivationOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.activation

    def __call__(self, x: Tensor, kind: str) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(out.data_ptr(), x.data_ptr(), x.numel(), _kind(kind), _code(x.dtype))
        return out


class ActivationAndMul:
    """See :class:`headrace_core.ops.ActivationAndMulOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.activation_and_mul

    def __call__(self, x: Tensor, kind: str) -> Tensor:
        x, rows, stride = _matrix(x)
        width = x.shape[1] // 2
        out = _empty(rows, width, dtype=x.dtype)
        self._kernel(out.data_ptr(), x.data_ptr(), rows, width, stride, _kind(kind), _code(x.dtype))
        return out


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
            raise ConfigError(f"rotary: query is {_describe(query)}, key is {_describe(key)}")
        _check_rotation(cos_sin, positions, tokens, dim)
        positions = _int64(positions)
        status = self._kernel(
            query.data_ptr(), key.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens,
            q_heads, key.shape[1], dim, q_row, q_head, k_row, k_head, cos_sin.shape[0],
            cos_sin.shape[1], cos_sin.stride(0), interleaved, _code(query.dtype),
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
        self._geometries = _Geometries()

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        key, value = _unit_last(key), _unit_last(value)
        k_row, k_head, _ = key.stride()
        v_row, v_head, _ = value.stride()
        slot_mapping = _int64(slot_mapping)
        tokens = slot_mapping.shape[0]
        _check_key_value(key, value, tokens)
        _, kv_heads, dim = key.shape
        geometry = self._geometries.of(key_cache, value_cache, key.dtype, dim)
        status = self._kernel(
            key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            slot_mapping.data_ptr(), geometry, tokens, kv_heads, dim, k_row, k_head, v_row, v_head,
            _code(key.dtype),
        )  # fmt: skip
        if status:
            raise IndexError(_beyond("cache_write", key_cache))


class RotaryCacheWrite:
    """See :class:`headrace_core.ops.RotaryCacheWriteOp`; the bits of its parts done one by one.

    Raises:
        IndexError: a slot is beyond the cache or a position beyond the table.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.rotary_cache_write
        self._geometries = _Geometries()

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
    ) -> None:
        tokens, q_heads, dim = query.shape
        q_row, q_head, q_dim = query.stride()
        if q_dim != 1 and dim > 1:
            raise ConfigError("rotary_cache_write: query must have unit stride in D")
        key, value = _unit_last(key), _unit_last(value)
        k_row, k_head, _ = key.stride()
        v_row, v_head, _ = value.stride()
        dtype = query.dtype
        _check_key_value(key, value, tokens)
        if key.dtype != dtype or key.shape[2] != dim or slot_mapping.shape[0] != tokens:
            raise ConfigError(
                f"rotary_cache_write: query is {_describe(query)}, key is {_describe(key)}, "
                f"slot_mapping is {_describe(slot_mapping)}"
            )
        slot_mapping, positions = _int64(slot_mapping), _int64(positions)
        table, num_positions, rotary_dim, table_stride = None, 0, 0, 0
        if cos_sin is not None:
            _check_rotation(cos_sin, positions, tokens, dim)
            table, table_stride = cos_sin.data_ptr(), cos_sin.stride(0)
            num_positions, rotary_dim = cos_sin.shape
        q_weight = k_weight = None
        eps = offset = 0.0
        code = weight_code = _code(dtype)
        if head_norm is not None:
            eps, offset = head_norm.eps, head_norm.offset
            q_tensor, weight_code = _weight_like(head_norm.query_weight, dtype, dim)
            k_tensor = _vector(head_norm.key_weight, q_tensor.dtype, dim, "head_norm: key_weight")
            q_weight, k_weight = q_tensor.data_ptr(), k_tensor.data_ptr()
        status = self._kernel(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), positions.data_ptr(), table,
            key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(),
            self._geometries.of(key_cache, value_cache, dtype, dim), q_weight, k_weight, tokens, q_heads,
            key.shape[1], dim, q_row, q_head, k_row, k_head, v_row, v_head, num_positions,
            rotary_dim, table_stride, eps, offset, interleaved, code, weight_code,
        )  # fmt: skip
        if status:
            raise IndexError(
                f"{_beyond('rotary_cache_write', key_cache)}, or a position outside "
                f"[0, {num_positions})"
            )


class PagedAttention:
    """See :class:`headrace_core.ops.PagedAttentionOp`.

    Raises:
        IndexError: a block table names a block that the cache does not have.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.paged_attention
        self._geometries = _Geometries()

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
    ) -> Tensor:
        query = _unit_last(query)
        tokens, q_heads, dim = query.shape
        q_row, q_head, _ = query.stride()
        kv_heads, requests = key_cache.shape[2], seq_lens.shape[0]
        if q_heads % kv_heads or cu_seqlens_q.shape[0] != requests + 1:
            raise ConfigError(
                f"paged_attention: {q_heads} query heads for {kv_heads} kv heads, cu_seqlens_q "
                f"{_describe(cu_seqlens_q)} for seq_lens {_describe(seq_lens)}"
            )
        if block_table.stride(1) != 1 and block_table.shape[1] > 1:
            block_table = block_table.contiguous()
        block_table, cu_seqlens_q = _int32(block_table), _int32(cu_seqlens_q)
        seq_lens = _int32(seq_lens)
        sink_pointer = None
        if sinks is not None:
            sinks = _vector(sinks.float(), torch.float32, q_heads, "paged_attention: sinks")
            sink_pointer = sinks.data_ptr()
        window = 0 if sliding_window is None else sliding_window
        out = _empty(tokens, q_heads, dim, dtype=query.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
            block_table.data_ptr(), cu_seqlens_q.data_ptr(), seq_lens.data_ptr(), sink_pointer,
            self._geometries.of(key_cache, value_cache, query.dtype, dim), tokens, requests,
            q_heads, kv_heads, dim, q_row, q_head, block_table.stride(0), block_table.shape[1],
            window, scale, soft_cap, _code(query.dtype),
        )  # fmt: skip
        if status == BAD_LENGTHS:
            raise ConfigError(
                f"paged_attention: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise within the "
                f"{tokens} rows of query"
            )
        if status:
            raise IndexError(
                f"paged_attention: a block table names a block outside [0, {key_cache.shape[0]}) "
                "or is too narrow for its seq_lens"
            )
        return out


class Linear:
    """See :class:`headrace_core.ops.LinearOp`; ``data`` is the packed weight, uint8."""

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.linear

    def pack(self, weight: Tensor) -> PackedLinear:
        weight, out_features, stride = _matrix(weight)
        in_features, code = weight.shape[1], _code(weight.dtype)
        num_bytes = self._library.linear_packed_bytes(out_features, in_features, code)
        data = _empty(num_bytes, dtype=torch.uint8)
        self._library.linear_pack(
            data.data_ptr(), weight.data_ptr(), out_features, in_features, stride, code
        )
        return PackedLinear(in_features, out_features, _NAMES[weight.dtype], data, num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, rows, stride = _matrix(x)
        dtype, out_features = x.dtype, packed.out_features
        if x.shape[1] != packed.in_features or _NAMES.get(dtype) != packed.dtype:
            raise ConfigError(_mismatch("linear", x, packed))
        bias_pointer = None
        if bias is not None:
            bias = _vector(bias, dtype, out_features, "linear: bias")
            bias_pointer = bias.data_ptr()
        out = _empty(rows, out_features, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), bias_pointer, rows,
            out_features, packed.in_features, stride, _CODES[dtype],
        )  # fmt: skip
        return out


class Int8Linear:
    """See :class:`headrace_core.ops.Int8LinearOp`; ``data`` is (packed weight uint8, scales)."""

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.int8_linear

    def pack(self, weight: Tensor, scales: Tensor, dtype: str) -> PackedLinear:
        if dtype not in DTYPES or weight.dtype != torch.int8:
            raise ConfigError(
                f"int8_linear: weight is {_describe(weight)} for {dtype!r} activations; it must "
                f"be int8, and activations one of {list(DTYPES)}"
            )
        weight, out_features, stride = _matrix(weight)
        in_features = weight.shape[1]
        scales = _vector(scales, torch.float32, out_features, "int8_linear: scales").clone()
        num_bytes = self._library.int8_packed_bytes(out_features, in_features)
        data = _empty(num_bytes, dtype=torch.uint8)
        self._library.int8_pack(
            data.data_ptr(), weight.data_ptr(), out_features, in_features, stride
        )
        num_bytes += 4 * out_features
        return PackedLinear(in_features, out_features, dtype, (data, scales), num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, rows, stride = _matrix(x)
        dtype, out_features = x.dtype, packed.out_features
        if x.shape[1] != packed.in_features or _NAMES.get(dtype) != packed.dtype:
            raise ConfigError(_mismatch("int8_linear", x, packed))
        data, scales = packed.data
        bias_pointer = None
        if bias is not None:
            bias = _vector(bias, dtype, out_features, "int8_linear: bias")
            bias_pointer = bias.data_ptr()
        out = _empty(rows, out_features, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), data.data_ptr(), scales.data_ptr(), bias_pointer, rows,
            out_features, packed.in_features, stride, _CODES[dtype],
        )  # fmt: skip
        return out


class MoE:
    """See :class:`headrace_core.ops.MoEOp`; ``data`` is (gate_up, down, experts, intermediate).

    Raises:
        IndexError: a routed expert does not exist.
    """

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.moe

    def pack(self, gate_up: Tensor, down: Tensor) -> PackedLinear:
        experts, double, hidden = gate_up.shape
        intermediate = double // 2
        if down.shape != (experts, hidden, intermediate) or down.dtype != gate_up.dtype:
            raise ConfigError(
                f"moe: gate_up is {_describe(gate_up)}, so down must be "
                f"[{experts}, {hidden}, {intermediate}]; it is {_describe(down)}"
            )
        first, second = self._pack_all(gate_up), self._pack_all(down)
        return PackedLinear(
            in_features=hidden,
            out_features=hidden,
            dtype=_NAMES[gate_up.dtype],
            data=(first, second, experts, intermediate),
            num_bytes=first.numel() + second.numel(),
        )

    def _pack_all(self, weight: Tensor) -> Tensor:
        """[E, N, K] -> [E, bytes] uint8, each expert packed as a linear weight."""
        experts, out_features, in_features = weight.shape
        code = _code(weight.dtype)
        num_bytes = self._library.linear_packed_bytes(out_features, in_features, code)
        data = _empty((experts, num_bytes), dtype=torch.uint8)
        for expert in range(experts):
            matrix, _, stride = _matrix(weight[expert])
            self._library.linear_pack(
                data[expert].data_ptr(), matrix.data_ptr(), out_features, in_features, stride, code
            )
        return data

    def __call__(
        self, x: Tensor, packed: PackedLinear, topk_weights: Tensor, topk_ids: Tensor, kind: str
    ) -> Tensor:
        x, rows, stride = _matrix(x)
        dtype, (tokens, top_k) = x.dtype, topk_ids.shape
        if x.shape[1] != packed.in_features or _NAMES.get(dtype) != packed.dtype:
            raise ConfigError(_mismatch("moe", x, packed))
        if tokens != rows or topk_weights.shape != topk_ids.shape:
            raise ConfigError(
                f"moe: x is {_describe(x)}, topk_ids {_describe(topk_ids)}, topk_weights "
                f"{_describe(topk_weights)}"
            )
        gate_up, down, experts, intermediate = packed.data
        weights, ids = topk_weights.float().contiguous(), _int64(topk_ids)
        out = _empty(rows, packed.out_features, dtype=dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), gate_up.data_ptr(), down.data_ptr(),
            weights.data_ptr(), ids.data_ptr(), rows, top_k, experts, packed.in_features,
            intermediate, stride, _kind(kind), _CODES[dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"moe: a routed expert is outside [0, {experts})")
        return out


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _mismatch(op: str, x: Tensor, packed: PackedLinear) -> str:
    return f"{op}: x is {_describe(x)}, packed for {packed.dtype} [*, {packed.in_features}]"


def _beyond(op: str, cache: Tensor) -> str:
    return f"{op}: a slot is beyond the cache's {cache.shape[0]} blocks of {cache.shape[1]}"


def _code(dtype: torch.dtype) -> int:
    try:
        return _CODES[dtype]
    except KeyError:
        raise ConfigError(f"dtype {dtype} is not supported; use one of {list(DTYPES)}") from None


def _kind(kind: str) -> int:
    try:
        return _KINDS[kind]
    except KeyError:
        raise ConfigError(
            f"activation kind {kind!r} is unknown; kinds are {list(ACTIVATIONS)}"
        ) from None


def _int64(x: Tensor) -> Tensor:
    if x.dtype is not torch.int64:
        x = x.long()
    return x if x.is_contiguous() else x.contiguous()


def _int32(x: Tensor) -> Tensor:
    """x as int32, strides kept (callers pass dim-0 stride of tables)."""
    return x if x.dtype is torch.int32 else x.int()


def _unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _matrix(x: Tensor) -> tuple[Tensor, int, int]:
    """x [T, n] readable by rows: (x, T, row stride)."""
    stride, last = x.stride()
    if last != 1:
        x = x.contiguous()
        stride = x.stride(0)
    return x, x.shape[0], stride


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x [..., n] as rows: (x, count, inner, outer stride, inner stride), see rowwise.h."""
    shape, strides = x.shape, x.stride()
    if strides[-1] == 1:
        if len(shape) == 2:
            return x, shape[0], 1, strides[0], 0
        if len(shape) == 3:
            return x, shape[0] * shape[1], max(1, shape[1]), strides[0], strides[1]
    x, width = x.contiguous(), shape[-1]
    return x, x.numel() // max(1, width), 1, width, 0


def _vector(x: Tensor, dtype: torch.dtype, size: int, name: str) -> Tensor:
    if x.dtype is not dtype or x.shape != (size,):
        raise ConfigError(f"{name} is {_describe(x)}; it must be {dtype} [{size}]")
    return x if x.is_contiguous() else x.contiguous()


def _weight_like(weight: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, int]:
    """A norm's weight, in the rows' dtype or float32, and its dtype's code."""
    found = weight.dtype
    if found is not dtype and found is not torch.float32:
        raise ConfigError(f"norm weight is {_describe(weight)}; it must be {dtype} or float32")
    return _vector(weight, found, size, "norm weight"), _code(found)


def _check_rotation(cos_sin: Tensor, positions: Tensor, tokens: int, dim: int) -> None:
    if (
        cos_sin.dtype is not torch.float32
        or cos_sin.stride(1) != 1
        or cos_sin.shape[1] > dim
        or cos_sin.shape[1] % 2
        or positions.shape != (tokens,)
    ):
        raise ConfigError(
            f"cos_sin is {_describe(cos_sin)} and positions {_describe(positions)}; they must be "
            f"float32 [P, R] with even R <= {dim} and unit stride, and [{tokens}]"
        )


def _check_key_value(key: Tensor, value: Tensor, tokens: int) -> None:
    if key.shape != value.shape or key.dtype != value.dtype or key.shape[0] < tokens:
        raise ConfigError(
            f"key is {_describe(key)} and value {_describe(value)}; they must be alike and have "
            f"at least {tokens} rows"
        )


class _Geometries:
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
                f"caches are {_describe(key_cache)} and {_describe(value_cache)}; they must be "
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
