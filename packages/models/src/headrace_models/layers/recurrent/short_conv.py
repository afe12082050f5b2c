"""LFM2's mixer: a gated convolution over a few tokens. Liquid AI 2025, arXiv:2511.23404."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.base import Part
from headrace_models.layers.linear import column_parallel, row_parallel, shard_of
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class ShortConv(RecurrentLayer):
    """``out(c * conv(b * x))``, with b, c and x projected from the input; channels are spread over the
    ranks.

    Args:
        bias: of both projections and of the convolution.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, taps: int, *, bias: bool
    ) -> None:
        shard = shard_of(hidden_size, context.communicator, what=f"{name}, channels")
        own = Part(hidden_size // shard.count, shard)
        conv = CausalConv(context, f"{name}.conv", (own,), taps, bias=bias, activation=None)
        super().__init__(context, name, (conv.state_shape(),))
        self.ops = context.ops
        parts = (hidden_size,) * 3
        self.in_proj = column_parallel(context, f"{name}.in_proj", hidden_size, parts, bias=bias)
        self.conv = conv
        self.out_proj = row_parallel(
            context, f"{name}.out_proj", hidden_size, hidden_size, bias=bias
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        opens, lets_out, inner = self.in_proj(x).chunk(3, dim=-1)
        inner = self.conv(self.ops.gate(inner, opens), self.state(0, batch))
        return self.out_proj(self.ops.gate(lets_out, inner))
