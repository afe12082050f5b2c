"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Layer, Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class RMSNorm(WeightLayer):
    """See :class:`headrace_core.ops.RMSNormOp`; ``offset`` 1.0 is Gemma's form."""

    weight: Tensor

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *, offset: float = 0.0
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.size, self.eps, self.offset = size, eps, offset

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)`` in one pass; gives up both inputs."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


class UnweightedRMSNorm(Layer):
    """An RMS norm whose weight is 1, and in no checkpoint."""

    def __init__(self, context: BuildContext, size: int, eps: float) -> None:
        self.ops = context.ops
        self.eps = eps
        self.weight = torch.ones(size, dtype=getattr(torch, context.dtype), device=context.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(WeightLayer):
    """See :class:`headrace_core.ops.LayerNormOp`."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *, bias: bool = True
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.size, self.eps = size, eps
        self.has_bias = bias

    def slots(self) -> Mapping[str, Slot]:
        names = ("weight", "bias") if self.has_bias else ("weight",)
        return {name: Slot((self.size,)) for name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)`` in one pass; gives up both inputs."""
        if residual is None:
            return self(x), x
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
