"""PLaMo 2's mixer: Mamba 2's scan, whose step, keys and queries come of what was convolved, as Mamba's do.

Letters: T tokens, H heads of P channels, N length of a channel's state, R rank of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.base import Part
from headrace_models.layers.causal_conv import CausalConv
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import Linear, column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mamba2 import StateSpaceScan
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.mamba2 import Mamba2Sizes


VECTOR_NORMS = ("B_norm", "C_norm", "dt_norm")
"""Of keys, queries and steps, in the order in which they are projected."""


class PlamoMamba(RecurrentLayer):
    """``out(scan(x) * silu(gate))``. Heads are spread over the ranks.

    Args:
        step_rank: R.
        norm_eps: of the norms of step, key and query.

    Raises:
        UnsupportedModel: several groups; keys and queries are of all heads.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: Mamba2Sizes,
        *,
        step_rank: int,
        norm_eps: float,
    ) -> None:
        if sizes.num_groups != 1:
            raise UnsupportedModel(f"{name}: {sizes.num_groups} groups of heads: must be 1")
        shard = dividing_shard(sizes.num_heads, context.communicator, what=f"{name}, heads")
        heads = Part(sizes.num_heads // shard.count, shard)
        channels = Part(sizes.channels // shard.count, shard)
        conv = CausalConv(
            context, f"{name}.conv1d", (channels,), sizes.taps, bias=False, activation="silu"
        )
        scanned = StateShape((heads.size, sizes.head_dim, sizes.state_size), "float32")
        super().__init__(context, name, (conv.state_shape(), scanned))
        self.ops, self.sizes = context.ops, sizes
        length = sizes.state_size
        self.vectors = [length, length, step_rank]
        self.in_proj = column_parallel(
            context,
            f"{name}.in_proj",
            sizes.hidden_size,
            (sizes.channels, sizes.channels),
            units=(sizes.num_heads,) * 2,
        )
        self.conv = conv
        self.bcdt_proj = row_parallel(
            context, f"{name}.bcdt_proj", sizes.channels, sum(self.vectors)
        )
        self.norms = [
            RMSNorm(context, f"{name}.{norm}", size, norm_eps)
            for norm, size in zip(VECTOR_NORMS, self.vectors)
        ]
        self.dt_proj = Linear(context, f"{name}.dt_proj", step_rank, (heads,))
        self.scan = StateSpaceScan(context, name, heads, (0.0, float("inf")))
        self.out_proj = row_parallel(context, f"{name}.out_proj", sizes.channels, sizes.hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        gate, inner = self.in_proj(x).chunk(2, dim=-1)
        inner = self.conv(inner, self.state(0, batch))
        vectors = torch.split(self.bcdt_proj(inner), self.vectors, dim=-1)
        key, query, step = (norm(v) for norm, v in zip(self.norms, vectors))
        length = self.sizes.state_size
        out = self.scan(
            by_heads(inner, self.sizes.head_dim),
            self.dt_proj(step),
            by_heads(key, length),
            by_heads(query, length),
            self.state(1, batch),
        )
        return self.out_proj(self.ops.gate(out.flatten(1), gate, activation="silu"))
