"""Convolution over time, as a product of rows with the weight: the same kernels as linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

_WIDTH = 3


class Conv1d(WeightLayer):
    """Three neighbouring rows make one; the ends are padded with a row of zeros."""

    def __init__(
        self, context: BuildContext, name: str, in_size: int, out_size: int, *, stride: int = 1
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.in_size, self.out_size, self.stride = in_size, out_size, stride
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        shape = (self.out_size, self.in_size, _WIDTH)
        return {"weight": Slot(shape), "bias": Slot((self.out_size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        by_row = tensors["weight"].transpose(1, 2).reshape(self.out_size, -1)
        self.packed = self.ops.linear.pack(by_row.contiguous())
        self.bias = tensors["bias"]

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Its result after an activation: x [L, in_size] -> [ceil(L / stride), out_size]."""
        assert self.packed is not None, self.name
        padded = torch.zeros((x.shape[0] + 2, x.shape[1]), dtype=x.dtype, device=x.device)
        padded[1:-1] = x
        rows = padded.unfold(0, _WIDTH, self.stride).transpose(1, 2)  # [n, 3, in_size]
        flat = rows.reshape(rows.shape[0], -1)
        return self.ops.linear.activated(flat, self.packed, activation, self.bias)
