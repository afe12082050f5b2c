"""Feed-forward layers of towers: CLIP's, whose activation is ``x * sigmoid(1.702 x)``, and projectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.config.settings import Settings
from headrace_models.layers.linear import column_parallel, row_parallel
from headrace_models.layers.mlp import MLP, MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

QUICK_GELU = "quick_gelu"
_SLOPE = 1.702
"""Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""


class QuickMLP(MLP):
    """``down(act(up(x)))``: the activation is SiLU's, stretched."""

    def __init__(
        self,
        context: BuildContext,
        up_name: str,
        down_name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            context, up_name, down_name, hidden_size, intermediate_size, "silu", bias=bias
        )
        self.ops = context.ops

    def __call__(self, x: Tensor) -> Tensor:
        x = self.ops.activation(self.ops.scale(self.up(x), _SLOPE), self.activation)
        return self.down(self.ops.scale(x, 1 / _SLOPE))


def vision_mlp(
    context: BuildContext,
    settings: Settings,
    up_name: str,
    down_name: str,
    sizes: tuple[int, int],
    *,
    key: str = "hidden_act",
) -> MLP:
    """The feed-forward layer of a block.

    Args:
        sizes: of the stream and between the two products.
        key: of the activation in the config.
    """
    if settings.config.get(key) == QUICK_GELU:
        return QuickMLP(context, up_name, down_name, *sizes)
    return MLP(context, up_name, down_name, *sizes, settings.activation(key))


class Projector(MLPLayer):
    """``down(act(up(x)))`` between two sizes.

    Args:
        sizes: of what comes, between the products, and of the result.
    """

    def __init__(
        self,
        context: BuildContext,
        up_name: str,
        down_name: str,
        sizes: tuple[int, int, int],
        activation: str,
        *,
        bias: bool = True,
    ) -> None:
        self.activation = activation
        before, between, after = sizes
        self.up = column_parallel(context, up_name, before, (between,), bias=bias)
        self.down = row_parallel(context, down_name, between, after, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, sizes[0]] -> [T, sizes[2]]."""
        return self.down(self.up.activated(x, self.activation))
