"""A feed-forward layer whose activation learns two numbers: Huang & Schlag 2024, arXiv:2411.13010."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F

from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.linear import column_parallel, row_parallel
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_BETA, _EPS = 0.5, -1e-6


class XIELU(WeightLayer):
    """See :class:`headrace_core.ops.XIELUOp`. Stored are ``alpha_p`` and ``alpha_n`` [1], before their
    softplus, and perhaps the constants ``beta`` and ``eps`` []."""

    def __init__(self, context: BuildContext, name: str) -> None:
        self.name, self.ops = name, context.ops

    def slots(self) -> Mapping[str, Slot]:
        learned = Slot((1,), "float32", any_float=True)
        constant = Slot((), "float32", any_float=True, required=False)
        return {"alpha_p": learned, "alpha_n": learned, "beta": constant, "eps": constant}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.beta = float(tensors["beta"]) if "beta" in tensors else _BETA
        self.eps = float(tensors["eps"]) if "eps" in tensors else _EPS
        self.alpha_p = float(F.softplus(tensors["alpha_p"]))
        self.alpha_n = self.beta + float(F.softplus(tensors["alpha_n"]))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> the same shape."""
        return self.ops.xielu(x, self.alpha_p, self.alpha_n, beta=self.beta, eps=self.eps)


class XIELUMLP(MLPLayer):
    """``down(xielu(up(x)))``."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, intermediate_size: int
    ) -> None:
        self.up = column_parallel(context, f"{name}.up_proj", hidden_size, (intermediate_size,))
        self.activation = XIELU(context, f"{name}.act_fn")
        self.down = row_parallel(context, f"{name}.down_proj", intermediate_size, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
