"""Linear layers: plain, and with int8 weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headrace_core.ops import PackedLinear
from headrace_core.reference.dtypes import widened


class Linear:
    """See :class:`headrace_core.ops.LinearOp`. Packing keeps the weight as it is."""

    pack_copies = False

    def pack(self, weight: Tensor) -> PackedLinear:
        return PackedLinear(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            dtype=dtype_name(weight),
            data=weight,
            num_bytes=weight.numel() * weight.element_size(),
        )

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, packed.data, bias)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        found: Tensor = packed.data[ids]
        return found


class Int8Linear:
    """See :class:`headrace_core.ops.Int8LinearOp`. Packing keeps weight and scales as they are."""

    def pack(self, weight: Tensor, scales: Tensor, dtype: str) -> PackedLinear:
        return PackedLinear(
            in_features=weight.shape[1],
            out_features=weight.shape[0],
            dtype=dtype,
            data=(weight, scales),
            num_bytes=weight.numel() + scales.numel() * scales.element_size(),
        )

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        weight, scales = packed.data
        wide = widened(x)
        out: Tensor = (wide @ weight.to(wide.dtype).T) * scales
        if bias is not None:
            out = out + bias.to(wide.dtype)
        return out.to(x.dtype)


def dtype_name(x: Tensor) -> str:
    """``bfloat16`` for torch.bfloat16, and so on."""
    return str(x.dtype).removeprefix("torch.")


linear = Linear()
int8_linear = Int8Linear()
