"""Griffin's recurrent half: a convolution, then a linear recurrence with gates, let through by a branch
beside it. De et al. 2024, arXiv:2402.19427.

Letters: T tokens, C channels of this rank in B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.causal_conv import CausalConv
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.state_layer import StateArguments


class GriffinMixer(RecurrentLayer):
    """``out(act(y(x)) * recurrence(conv(x(x))))``. Blocks are spread over the ranks.

    Args:
        num_blocks: of the gates' weights, which mix channels of a block only.

    Raises:
        UnsupportedModel: blocks that cannot be spread, or channels that cannot be divided into them.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        channels: int,
        num_blocks: int,
        taps: int,
        activation: str,
    ) -> None:
        if channels % num_blocks:
            raise UnsupportedModel(
                f"{name}: {channels} channels cannot be divided into {num_blocks} equal blocks"
            )
        shard = dividing_shard(num_blocks, context.communicator, what=f"{name}, blocks")
        own = Part(channels // shard.count, shard)
        conv = CausalConv(context, f"{name}.conv_1d", (own,), taps, bias=True, activation=None)
        super().__init__(context, name, (conv.state_shape(), StateShape((own.size,), "float32")))
        self.ops, self.activation = context.ops, activation
        self.branch = column_parallel(
            context, f"{name}.linear_y", hidden_size, (channels,), bias=True
        )
        self.inputs = column_parallel(
            context, f"{name}.linear_x", hidden_size, (channels,), bias=True
        )
        self.conv = conv
        blocks = Part(num_blocks // shard.count, shard)
        self.recurrence = RGLRU(context, f"{name}.rg_lru", own, blocks)
        self.out = row_parallel(context, f"{name}.linear_out", channels, hidden_size, bias=True)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        branch = self.branch.activated(x, self.activation)
        inner = self.conv(self.inputs(x), self.state(0, batch))
        return self.out(self.ops.gate(self.recurrence(inner, self.state(1, batch)), branch))


class RGLRU(WeightLayer):
    """See :class:`headrace_core.ops.RGLRUOp`, with the projections to its gates.

    Args:
        channels, blocks: what this rank keeps of them.
    """

    def __init__(self, context: BuildContext, name: str, channels: Part, blocks: Part) -> None:
        self.name = name
        self.ops = context.ops
        self.channels, self.blocks = channels, blocks
        self.block_size = channels.size // blocks.size
        self.packed: list[PackedLinear] = []
        self.biases: list[Tensor] = []

    def slots(self) -> Mapping[str, Slot]:
        size, count, parts = self.block_size, self.blocks.size, (self.blocks,)
        weight = Slot((count, size, size), parts=parts)
        bias = Slot((count, size), "float32", parts=parts, any_float=True)
        own = (self.channels,)
        return {
            "recurrent_param": Slot((own[0].size,), "float32", parts=own, any_float=True),
            "input_gate_weight": weight,
            "input_gate_bias": bias,
            "recurrent_gate_weight": weight,
            "recurrent_gate_bias": bias,
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        gates = ("input_gate", "recurrent_gate")
        pack = self.ops.head_linear.pack
        # The checkpoint's are [in, out] of each block.
        self.packed = [pack(tensors[f"{g}_weight"].transpose(1, 2).contiguous()) for g in gates]
        self.biases = [tensors[f"{gate}_bias"].flatten() for gate in gates]
        self.decay = tensors["recurrent_param"]

    def __call__(self, x: Tensor, state: StateArguments) -> Tensor:
        """x [T, C] -> the same shape."""
        blocks = by_heads(x, self.block_size)
        opens, decays = (self.ops.head_linear(blocks, packed).flatten(1) for packed in self.packed)
        return self.ops.rg_lru(
            x,
            opens,
            decays,
            self.decay,
            *state,
            input_bias=self.biases[0],
            decay_bias=self.biases[1],
        )
