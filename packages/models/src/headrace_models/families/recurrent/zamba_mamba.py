"""Zamba's mixer: Mamba's, with the projections to step, key and query of each of a few heads. Glorioso et
al. 2024, arXiv:2405.16712.

Letters: T tokens, H heads of this rank of P channels, N length of a channel's state, R rank of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.mamba import MambaSizes
    from headrace_models.layers.recurrent.state_layer import StateArguments


class HeadedMambaMixer(RecurrentLayer):
    """Heads are spread over the ranks.

    Raises:
        UnsupportedModel: channels that cannot be divided into heads.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MambaSizes,
        num_heads: int,
        *,
        activation: str,
        bias: bool,
        conv_bias: bool,
    ) -> None:
        if sizes.channels % num_heads:
            raise UnsupportedModel(
                f"config.json: n_mamba_heads = {num_heads}: must divide {sizes.channels} channels"
            )
        shard = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        own = Part(sizes.channels // shard.count, shard)
        conv = CausalConv(
            context, f"{name}.conv1d", (own,), sizes.taps, bias=conv_bias, activation=activation
        )
        scanned = StateShape((own.size, sizes.state_size), "float32")
        super().__init__(context, name, (conv.state_shape(), scanned))
        hidden, both = sizes.hidden_size, (sizes.channels, sizes.channels)
        self.in_proj = column_parallel(context, f"{name}.in_proj", hidden, both, bias=bias)
        self.conv = conv
        heads = Part(num_heads // shard.count, shard)
        self.scan = HeadedScan(context, name, sizes, heads, sizes.channels // num_heads)
        self.out_proj = row_parallel(context, f"{name}.out_proj", sizes.channels, hidden, bias=bias)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inner, gate = self.in_proj(x).chunk(2, dim=-1)
        inner = self.conv(inner, self.state(0, batch))
        return self.out_proj(self.scan(inner, gate, self.state(1, batch)))


class HeadedScan(WeightLayer):
    """See :class:`headrace_core.ops.SelectiveScanOp`, once for each head, and what it is fed with.

    Args:
        heads: those that this rank keeps.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: MambaSizes, heads: Part, head_dim: int
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.sizes, self.heads, self.head_dim = sizes, heads, head_dim

    def slots(self) -> Mapping[str, Slot]:
        heads, size, parts = self.heads.size, self.head_dim, (self.heads,)
        length, rank = self.sizes.state_size, self.sizes.step_rank
        each = Slot((heads, size), "float32", parts=parts, any_float=True)
        return {
            "x_proj_weight": Slot((heads, rank + 2 * length, size), parts=parts),
            "dt_proj_weight": Slot((heads, size, rank), parts=parts),
            "dt_proj_bias": each,
            "A_log": Slot((heads, size, length), "float32", parts=parts, any_float=True),
            "D": each,
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pack = self.ops.head_linear.pack
        self.x_proj, self.dt_proj = pack(tensors["x_proj_weight"]), pack(tensors["dt_proj_weight"])
        self.rates = -torch.exp(tensors["A_log"])
        self.skip, self.step_bias = tensors["D"], tensors["dt_proj_bias"]

    def __call__(self, x: Tensor, gate: Tensor, state: StateArguments) -> Tensor:
        """x, gate [T, C] -> the same shape."""
        size, length = self.head_dim, self.sizes.state_size
        vectors = self.ops.head_linear(by_heads(x, size), self.x_proj)
        step, key, query = torch.split(vectors, [self.sizes.step_rank, length, length], dim=-1)
        steps = self.ops.head_linear(step, self.dt_proj)
        out = x.new_empty(x.shape)
        for head in range(self.heads.size):
            own = slice(head * size, (head + 1) * size)
            held = None if state.state is None else state.state[:, own]
            scanned = self.ops.selective_scan(
                x[:, own],
                steps[:, head],
                self.rates[head],
                key[:, head],
                query[:, head],
                self.skip[head],
                held,
                *state[1:],
                dt_bias=self.step_bias[head],
                gate=gate[:, own],
            )
            self.ops.copy_rows(scanned, out[:, own])
        return out
