"""Mamba's mixer: a convolution, then a selective scan of each channel. Gu and Dao 2023,
arXiv:2312.00752.

Letters: T tokens, C channels, N length of a channel's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear, column_parallel, row_parallel, shard_of
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of the mixers, of a config."""

    hidden_size: int
    channels: int
    state_size: int
    step_rank: int
    """Inputs of the projection that makes the step of each channel."""
    taps: int


class MambaMixer(RecurrentLayer):
    """Channels are spread over the ranks.

    Args:
        norms: of step, key and query, before the scan (Jamba, Falcon-Mamba); empty: none.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MambaSizes,
        *,
        activation: str,
        bias: bool,
        conv_bias: bool,
        norms: Sequence[RMSNorm] = (),
    ) -> None:
        channels = shard_of(sizes.channels, context.communicator, what=f"{name}, channels")
        own = Part(sizes.channels // channels.count, channels)
        conv = CausalConv(
            context, f"{name}.conv1d", (own,), sizes.taps, bias=conv_bias, activation=activation
        )
        scanned = StateShape((own.size, sizes.state_size), "float32")
        super().__init__(context, name, (conv.state_shape(), scanned))
        self.sizes = sizes
        hidden, both = sizes.hidden_size, (sizes.channels, sizes.channels)
        projected = sizes.step_rank + 2 * sizes.state_size
        self.in_proj = column_parallel(context, f"{name}.in_proj", hidden, both, bias=bias)
        self.conv = conv
        self.x_proj = row_parallel(context, f"{name}.x_proj", sizes.channels, projected)
        self.norms = list(norms)
        self.dt_proj = Linear(context, f"{name}.dt_proj", sizes.step_rank, (own,))
        self.scan = SelectiveScan(context, name, own, sizes.state_size)
        self.out_proj = row_parallel(context, f"{name}.out_proj", sizes.channels, hidden, bias=bias)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inner, gate = self.in_proj(x).chunk(2, dim=-1)  # [T, C] each
        inner = self.conv(inner, self.state(0, batch))
        length = self.sizes.state_size
        vectors = torch.split(self.x_proj(inner), [self.sizes.step_rank, length, length], dim=-1)
        if self.norms:
            vectors = tuple(norm(v) for norm, v in zip(self.norms, vectors))
        step, key, query = vectors
        state = self.state(1, batch)
        return self.out_proj(self.scan(inner, self.dt_proj(step), key, query, gate, state))


class SelectiveScan(WeightLayer):
    """See :class:`headrace_core.ops.SelectiveScanOp`.

    Args:
        name: of the mixer.
        own: the channels that this rank keeps.
    """

    def __init__(self, context: BuildContext, name: str, own: Part, state_size: int) -> None:
        self.name = name
        self.ops = context.ops
        self.own, self.state_size = own, state_size

    def slots(self) -> Mapping[str, Slot]:
        size, parts = self.own.size, (self.own,)
        each = Slot((size,), "float32", parts=parts, any_float=True)
        rates = Slot((size, self.state_size), "float32", parts=parts, any_float=True)
        return {"A_log": rates, "D": each, "dt_bias": each}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        rates = -torch.exp(tensors["A_log"])
        self.rates = rates.T.contiguous().T  # [C, N], the channels side by side
        self.skip, self.step_bias = tensors["D"], tensors["dt_bias"]

    def __call__(
        self, x: Tensor, step: Tensor, key: Tensor, query: Tensor, gate: Tensor,
        state: StateArguments,
    ) -> Tensor:  # fmt: skip
        """x, step and gate [T, C], key and query [T, N] -> [T, C]."""
        return self.ops.selective_scan(
            x, step, self.rates, key, query, self.skip, *state, dt_bias=self.step_bias, gate=gate
        )
