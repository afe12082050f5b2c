"""Linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.ops import PackedLinear
from headrace_reference.activations import activation, activation_and_mul
from headrace_reference.dtypes import unset_like


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

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return activation(self(x, packed, bias), kind)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return activation_and_mul(self(x, packed, bias), kind)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        found: Tensor = packed.data[ids]
        return found


class _FakeLinear(Linear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return unset_like(x, x.shape[0], packed.out_features)

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return unset_like(x, x.shape[0], packed.out_features)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return unset_like(x, x.shape[0], packed.out_features // 2)


class HeadLinear:
    """See :class:`headrace_core.ops.HeadLinearOp`. Packing keeps the weight as it is."""

    def pack(self, weight: Tensor) -> PackedLinear:
        return PackedLinear(
            in_features=weight.shape[2],
            out_features=weight.shape[1],
            dtype=dtype_name(weight),
            data=weight,
            num_bytes=weight.numel() * weight.element_size(),
        )

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return torch.einsum("thk,hnk->thn", x, packed.data)


class _FakeHeadLinear(HeadLinear):
    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return unset_like(x, *x.shape[:2], packed.out_features)


def dtype_name(x: Tensor) -> str:
    """``bfloat16`` for torch.bfloat16, and so on."""
    return str(x.dtype).removeprefix("torch.")


linear = Linear()
head_linear = HeadLinear()
fake_linear = _FakeLinear()
fake_head_linear = _FakeHeadLinear()
