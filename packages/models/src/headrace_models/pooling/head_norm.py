"""A layer norm within a head: in the head's own dtype, float32 by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class HeadNorm(WeightLayer):
    """See :class:`headrace_core.ops.LayerNormOp`.

    Args:
        name: as the checkpoint spells it.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, context: BuildContext, name: str, size: int, eps: float, *, bias: bool = True
    ) -> None:
        assert context.pooling is not None
        self.name = name
        self.ops = context.ops
        self.dtype = context.pooling.head_dtype
        self.size, self.eps, self.has_bias = size, eps, bias

    def slots(self) -> Mapping[str, Slot]:
        slot = Slot((self.size,), dtype=self.dtype, any_float=True)
        return {"weight": slot, "bias": slot} if self.has_bias else {"weight": slot}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors.get("bias")

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, size] float32 -> the same."""
        x = x.to(getattr(torch, self.dtype))
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps).float()
