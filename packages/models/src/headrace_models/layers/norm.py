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
    """See :class:`headrace_core.ops.RMSNormOp`; ``offset`` 1.0 is Gemma's form.

    Args:
        weight: whether the norm has one; else the checkpoint stores nothing of it.
    """

    weight: Tensor

    def __init__(
        self,
        context: BuildContext,
        name: str,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        weight: bool = True,
    ) -> None:
        self.name = name
        self.context, self.ops = context, context.ops
        self.size, self.eps, self.offset = size, eps, offset
        self.has_weight = weight

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,))} if self.has_weight else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"] if self.has_weight else _ones(self.context, self.size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps, offset=self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)`` in one pass; gives up both inputs."""
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, offset=self.offset)


class LayerNorm(WeightLayer):
    """See :class:`headrace_core.ops.LayerNormOp`.

    Args:
        weight: whether the norm has one; else it stores nothing but perhaps a bias (OLMo).
        offset: what the checkpoint's weights lack (Nemotron stores them less 1).
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        context: BuildContext,
        name: str,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        weight: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.name = name
        self.context, self.ops = context, context.ops
        self.size, self.eps, self.offset = size, eps, offset
        self.has_weight, self.has_bias = weight, bias

    def slots(self) -> Mapping[str, Slot]:
        names = (("weight", self.has_weight), ("bias", self.has_bias))
        return {name: Slot((self.size,)) for name, stored in names if stored}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"] if self.has_weight else _ones(self.context, self.size)
        self.weight = weight + self.offset if self.offset else weight
        self.bias = tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)`` in one pass; gives up both inputs."""
        if residual is None:
            return self(x), x
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class NoNorm(Layer):
    """Stands where there is no norm, as what comes before ends in one."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x twice: the norm that it ends in leaves nothing to be added."""
        assert residual is None
        return x, x


NormLayer = RMSNorm | LayerNorm


def _ones(context: BuildContext, size: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, context.dtype)
    return torch.ones(size, dtype=dtype, device=context.device)
