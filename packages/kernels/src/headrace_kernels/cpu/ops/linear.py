"""Linear layers over packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import PackedLinear
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.ops.arguments import (
    CODES,
    NAMES,
    activation_code,
    bias_for,
    dtype_code,
    gate_code,
    gate_width,
    int64,
    matrix,
    mismatch,
    rows_for,
    unit_last,
)


class Linear:
    """See :class:`headrace_core.ops.LinearOp`; ``data`` is the packed weight, uint8.

    Raises:
        IndexError: from :meth:`rows`, an id is outside [0, N).
    """

    pack_copies = True

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kernel, self._gated_kernel = library.linear, library.linear_gated
        self._activated_kernel = library.linear_activated

    @property
    def isa(self) -> str:
        """The instruction set, which decides on the packed weight's layout."""
        return self._library.isa

    def pack(self, weight: Tensor) -> PackedLinear:
        weight, out_features, stride = matrix(weight)
        in_features, code = weight.shape[1], dtype_code(weight.dtype)
        num_bytes = self._library.linear_packed_bytes(out_features, in_features, code)
        data = packed_buffer(num_bytes)
        self._library.linear_pack(
            data.data_ptr(), weight.data_ptr(), out_features, in_features, stride, code
        )
        return PackedLinear(in_features, out_features, NAMES[weight.dtype], data, num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, rows, stride = rows_for("linear", x, packed)
        dtype, out_features = x.dtype, packed.out_features
        bias, bias_pointer = bias_for("linear", bias, packed)
        out = torch.empty(rows, out_features, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), bias_pointer, rows,
            out_features, packed.in_features, stride, CODES[dtype],
        )  # fmt: skip
        return out

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        x, rows, stride = rows_for("linear", x, packed)
        dtype, out_features = x.dtype, packed.out_features
        bias, bias_pointer = bias_for("linear", bias, packed)
        out = torch.empty(rows, out_features, dtype=dtype)
        self._activated_kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), bias_pointer, rows,
            out_features, packed.in_features, stride, activation_code(kind), CODES[dtype],
        )  # fmt: skip
        return out

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        x, rows, stride = rows_for("linear", x, packed)
        dtype, width = x.dtype, gate_width("linear", packed)
        bias, bias_pointer = bias_for("linear", bias, packed)
        out = torch.empty(rows, width, dtype=dtype)
        self._gated_kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), bias_pointer, rows, width,
            packed.in_features, stride, gate_code(kind), CODES[dtype],
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        ids = int64(ids)
        rows = ids.shape[0]
        dtype = getattr(torch, packed.dtype)
        out = torch.empty(rows, packed.in_features, dtype=dtype)
        status = self._library.linear_rows(
            out.data_ptr(), ids.data_ptr(), packed.data.data_ptr(), rows, packed.out_features,
            packed.in_features, CODES[dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"embedding: an id is outside [0, {packed.out_features})")
        return out


class HeadLinear:
    """See :class:`headrace_core.ops.HeadLinearOp`; ``data`` is [Hq, bytes] uint8, each head's weight
    packed as a linear one."""

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.head_linear

    def pack(self, weight: Tensor) -> PackedLinear:
        heads, out_features, in_features = weight.shape
        code = dtype_code(weight.dtype)
        num_bytes = self._library.linear_packed_bytes(out_features, in_features, code)
        data = packed_buffer(heads * num_bytes).view(heads, num_bytes)
        for head in range(heads):
            rows, _, stride = matrix(weight[head])
            self._library.linear_pack(
                data[head].data_ptr(), rows.data_ptr(), out_features, in_features, stride, code
            )
        name = NAMES[weight.dtype]
        return PackedLinear(in_features, out_features, name, data, heads * num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        x = unit_last(x)
        rows, heads, width = x.shape
        if (heads, width) != (packed.data.shape[0], packed.in_features) or NAMES.get(
            x.dtype
        ) != packed.dtype:
            raise ConfigError(mismatch("head_linear", x, packed))
        out = torch.empty(rows, heads, packed.out_features, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), rows, heads, packed.out_features,
            width, *x.stride()[:2], CODES[x.dtype],
        )  # fmt: skip
        return out
