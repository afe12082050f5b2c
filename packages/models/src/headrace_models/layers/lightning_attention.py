"""Lightning attention: linear attention that forgets at a rate of each head. Qin et al. 2024,
arXiv:2401.04658."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace_core.kv import StateShape
from headrace_models.layers.base import Part
from headrace_models.layers.gated_norm import GatedRMSNorm
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.heads_norm import WholeRMSNorm
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_NORM_EPS = 1e-6


class LightningAttention(RecurrentLayer):
    """``out(sigmoid(gate(x)) * norm(attention))`` over activated queries, keys and values. Heads are spread
    over the ranks, which give each other what the norm over all of them needs.

    Args:
        depth: of the layer, from 0 to 1: the deeper, the slower it forgets.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        activation: str,
        depth: float,
    ) -> None:
        shard = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        heads = num_heads // shard.count
        size = num_heads * head_dim
        held = StateShape((heads, head_dim, head_dim), "float32")
        super().__init__(context, name, (held,))
        self.ops, self.head_dim, self.activation = context.ops, head_dim, activation
        self.inputs = column_parallel(
            context, f"{name}.qkv_proj", hidden_size, (size,) * 3, units=(num_heads,) * 3
        )
        self.gate = column_parallel(
            context, f"{name}.output_gate", hidden_size, (size,), units=(num_heads,)
        )
        self.norm: GatedRMSNorm | WholeRMSNorm
        if shard.count > 1:
            self.norm = WholeRMSNorm(context, f"{name}.norm", num_heads, head_dim, _NORM_EPS)
        else:
            self.norm = GatedRMSNorm(
                context,
                f"{name}.norm",
                Part(size),
                _NORM_EPS,
                groups=1,
                norm_first=True,
                activation="sigmoid",
            )
        self.out_proj = row_parallel(context, f"{name}.out_proj", size, hidden_size)
        exponents = torch.arange(1, num_heads + 1, dtype=torch.float32)
        slopes = 2.0 ** (-8.0 / num_heads * exponents) * (1 - depth + 1e-5)
        self.rates = -slopes.chunk(shard.count)[shard.index].to(context.device)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inputs = self.inputs.activated(x, self.activation)
        query, key, value = (by_heads(part, self.head_dim) for part in inputs.chunk(3, -1))
        out = self.ops.state_space_scan(
            value, None, self.rates, key, query, None, *self.state(0, batch)
        )
        return self.out_proj(self.gated(out, self.gate(x)))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """out [T, H, D] normed, gate [T, H * D] -> [T, H * D]."""
        if isinstance(self.norm, GatedRMSNorm):
            return self.norm(out.flatten(1), gate)
        return self.ops.gate(in_rows(self.norm(out)), gate, activation="sigmoid")
