"""Arguments of kernels: codes of dtypes, rows and strides, and tensors that they can read in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import ACTIVATIONS, GATED_ACTIVATIONS, PackedLinear
from headrace_kernels.cpu.library import DTYPES

CODES: Mapping[torch.dtype, int] = {getattr(torch, name): code for name, code in DTYPES.items()}
NAMES: Mapping[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
_KINDS: Mapping[str, int] = {name: code for code, name in enumerate(GATED_ACTIVATIONS)}
_WITHOUT_GATE: Mapping[str, int] = {name: _KINDS[name] for name in ACTIVATIONS}


def describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def mismatch(op: str, x: Tensor, packed: PackedLinear) -> str:
    return f"{op}: x is {describe(x)}, packed for {packed.dtype} [*, {packed.in_features}]"


def rows_for(op: str, x: Tensor, packed: PackedLinear) -> tuple[Tensor, int, int]:
    """x [T, K] as a kernel reads it: (x, T, row stride).

    Raises:
        ConfigError: the weight was packed for other activations.
    """
    x, rows, stride = matrix(x)
    if x.shape[1] != packed.in_features or NAMES.get(x.dtype) != packed.dtype:
        raise ConfigError(mismatch(op, x, packed))
    return x, rows, stride


def routed_rows(op: str, x: Tensor, packed: PackedLinear, ids: Tensor) -> tuple[Tensor, int, int]:
    """x [T, K], or [T, k, K] as experts each get their own, as a kernel reads it: (x, places that share a
    row, row stride).

    Raises:
        ConfigError: the weights were packed for other activations.
    """
    (rows, top_k), own = ids.shape, x.dim() == 3
    shape = (rows, top_k) if own else (rows,)
    if x.shape != (*shape, packed.in_features) or NAMES.get(x.dtype) != packed.dtype:
        raise ConfigError(f"{mismatch(op, x, packed)}, ids {describe(ids)}")
    if own:
        return x.contiguous(), 1, packed.in_features
    x, _, stride = matrix(x)
    return x, max(1, top_k), stride


def weights_for(op: str, weights: Tensor | None, ids: Tensor) -> Tensor | None:
    """Routing weights as kernels read them; None for ones.

    Raises:
        ConfigError: there are not as many as ids.
    """
    if weights is not None and weights.shape != ids.shape:
        raise ConfigError(f"{op}: ids are {describe(ids)}, weights {describe(weights)}")
    return None if weights is None else weights.float().contiguous()


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def bias_for(
    op: str, bias: Tensor | None, packed: PackedLinear
) -> tuple[Tensor | None, int | None]:
    """The bias [N] as a kernel reads it, to be kept while it does, and its address; None for none."""
    if bias is None:
        return None, None
    bias = vector(bias, getattr(torch, packed.dtype), packed.out_features, f"{op}: bias")
    return bias, bias.data_ptr()


def gate_width(op: str, packed: PackedLinear) -> int:
    """Number of outputs that are gates: half."""
    if packed.out_features % 2:
        raise ConfigError(
            f"{op}: a weight of {packed.out_features} outputs is not a gate and an up of equal size"
        )
    return packed.out_features // 2


def dtype_code(dtype: torch.dtype) -> int:
    try:
        return CODES[dtype]
    except KeyError:
        raise ConfigError(f"dtype {dtype} is not supported; use one of {list(DTYPES)}") from None


def activation_code(kind: str) -> int:
    return _code_of(kind, _WITHOUT_GATE)


def gate_code(kind: str) -> int:
    """Code of the activation between a gate and its input."""
    return _code_of(kind, _KINDS)


def _code_of(kind: str, codes: Mapping[str, int]) -> int:
    try:
        return codes[kind]
    except KeyError:
        raise ConfigError(f"activation kind {kind!r} is unknown; kinds are {list(codes)}") from None


def int64(x: Tensor) -> Tensor:
    if x.dtype is not torch.int64:
        x = x.long()
    return x if x.is_contiguous() else x.contiguous()


def int32(x: Tensor) -> Tensor:
    """x as int32, strides kept (callers pass dim-0 stride of tables)."""
    return x if x.dtype is torch.int32 else x.int()


def unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def matrix(x: Tensor) -> tuple[Tensor, int, int]:
    """x [T, n] readable by rows: (x, T, row stride)."""
    stride, last = x.stride()
    if last != 1:
        x = x.contiguous()
        stride = x.stride(0)
    return x, x.shape[0], stride


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """x [..., n] as rows: (x, count, inner, outer stride, inner stride), see rowwise.h."""
    shape, strides = x.shape, x.stride()
    if strides[-1] == 1:
        if len(shape) == 2:
            return x, shape[0], 1, strides[0], 0
        if len(shape) == 3:
            return x, shape[0] * shape[1], max(1, shape[1]), strides[0], strides[1]
    x, width = x.contiguous(), shape[-1]
    return x, x.numel() // max(1, width), 1, width, 0


def vector(x: Tensor, dtype: torch.dtype, size: int, name: str) -> Tensor:
    if x.dtype is not dtype or x.shape != (size,):
        raise ConfigError(f"{name} is {describe(x)}; it must be {dtype} [{size}]")
    return x if x.is_contiguous() else x.contiguous()


def partial_pointers(
    key_counts: Tensor | None, lse: Tensor | None, tokens: int, heads: int, op: str
) -> tuple[int | None, int | None]:
    """Addresses of what attention to a part of the keys takes (:class:`headrace_core.ops.PagedAttentionOp`).

    Raises:
        ConfigError: they do not fit, or are not contiguous.
    """
    for name, x, dtype, shape in (
        ("key_counts", key_counts, torch.int32, (tokens,)),
        ("lse", lse, torch.float32, (tokens, heads)),
    ):
        if x is not None and (x.dtype is not dtype or x.shape != shape or not x.is_contiguous()):
            raise ConfigError(
                f"{op}: {name} is {describe(x)}; it must be {dtype} {list(shape)}, contiguous"
            )
    return pointer(key_counts), pointer(lse)
