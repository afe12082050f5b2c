"""Lightning attention with rotated and normed queries and keys, as Ling 2.5 and Ring-linear have it. Ling
Team 2025, arXiv:2510.19338.

Letters: T tokens, H heads of this rank, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.kv import StateShape
from headrace_models.layers.base import Part
from headrace_models.layers.gated_norm import GatedRMSNorm
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class RotatedLightning(RecurrentLayer):
    """``dense(norm(attention) * sigmoid(gate(x)))``; what a head keeps fades at a rate of its own.

    Args:
        slopes: [heads] float32 of all ranks: what is kept of a token loses that much of its logarithm with
            each further one.
        rotary: [P, R] or None, as :class:`~headrace_models.layers.attention.ProjectedAttention`'s.
        norm_groups: of the norm behind the attention, equal parts of all channels.
        normed: whether queries and keys have norms.
        activation: of queries, keys and values, or None.
        qkv_bias, out_bias: of the first projection and the last.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        head_dim: int,
        slopes: Tensor,
        rotary: Tensor | None,
        norm_eps: float,
        norm_groups: int,
        normed: bool,
        activation: str | None,
        qkv_bias: bool,
        out_bias: bool,
    ) -> None:
        num_heads = slopes.shape[0]
        shard = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        size, own = num_heads * head_dim, num_heads // shard.count
        super().__init__(context, name, (StateShape((own, head_dim, head_dim), "float32"),))
        self.ops, self.head_dim, self.rotary = context.ops, head_dim, rotary
        self.activation = activation
        self.inputs = column_parallel(
            context,
            f"{name}.query_key_value",
            hidden_size,
            (size,) * 3,
            units=(num_heads,) * 3,
            bias=qkv_bias,
        )
        self.norms: list[RMSNorm] = []
        if normed:
            self.norms = [
                RMSNorm(context, f"{name}.{which}_layernorm", head_dim, norm_eps)
                for which in ("query", "key")
            ]
        self.gate = column_parallel(
            context, f"{name}.g_proj", hidden_size, (size,), units=(num_heads,)
        )
        self.norm = GatedRMSNorm(
            context,
            f"{name}.g_norm",
            Part(size // shard.count, shard),
            norm_eps,
            groups=norm_groups,
            norm_first=True,
            activation="sigmoid",
        )
        self.out_proj = row_parallel(context, f"{name}.dense", size, hidden_size, bias=out_bias)
        self.rates = -slopes.chunk(shard.count)[shard.index].to(context.device)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inputs = self.inputs(x)
        if self.activation is not None:
            inputs = self.ops.activation(inputs, self.activation)
        query, key, value = (by_heads(part, self.head_dim) for part in inputs.chunk(3, -1))
        if self.norms:
            query, key = (norm(part) for norm, part in zip(self.norms, (query, key)))
        if self.rotary is not None:
            self.ops.rotary(query, key, batch.positions, self.rotary, interleaved=False)
        query = by_heads(self.ops.scale(in_rows(query), self.head_dim**-0.5), self.head_dim)
        out = self.ops.state_space_scan(
            value, None, self.rates, key, query, None, *self.state(0, batch)
        )
        return self.out_proj(self.norm(in_rows(out), self.gate(x)))


def fading_slopes(slopes: Tensor, index: int, num_layers: int) -> Tensor:
    """Of layer ``index``: deeper layers forget more slowly. As the published code counts, whose first layer
    forgets faster than at the full rate."""
    return slopes * (1 - (index - 1) / max(1, num_layers - 1) + 1e-5)
