"""Feed-forward layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from headrace_models.layers.base import Layer
from headrace_models.layers.linear import column_parallel, row_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class MLPLayer(Layer, ABC):
    """A layer that stands after the attention in a block, dense or not."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> the same shape."""


class GatedMLP(MLPLayer):
    """``down(act(gate(x)) * up(x))``, gate and up in one product.

    Args:
        bias: of both products; down_bias: of the second if it differs.
        stored_fused: the checkpoint holds gate and up in one module (Phi-3).
        fused_name, part_names, down_name: the checkpoint's module names below ``name``.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        stored_fused: bool = False,
        fused_name: str = "gate_up_proj",
        part_names: tuple[str, ...] = ("gate_proj", "up_proj"),
        down_name: str = "down_proj",
    ) -> None:
        self.activation = activation
        self.gate_up = column_parallel(
            context,
            f"{name}.{fused_name}",
            hidden_size,
            (intermediate_size, intermediate_size),
            bias=bias,
            part_names=() if stored_fused else tuple(f"{name}.{part}" for part in part_names),
        )
        self.down = row_parallel(
            context,
            f"{name}.{down_name}",
            intermediate_size,
            hidden_size,
            bias=bias if down_bias is None else down_bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x, self.activation))


class MLP(MLPLayer):
    """``down(act(up(x)))``."""

    def __init__(
        self,
        context: BuildContext,
        up_name: str,
        down_name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool = True,
    ) -> None:
        self.activation = activation
        self.up = column_parallel(context, up_name, hidden_size, (intermediate_size,), bias=bias)
        self.down = row_parallel(context, down_name, intermediate_size, hidden_size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up.activated(x, self.activation))
