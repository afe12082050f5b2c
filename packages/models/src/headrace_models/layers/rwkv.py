"""RWKV 4's two halves, which mix each token with the one before. Peng et al. 2023, arXiv:2305.13048.

Letters: T tokens, C channels (of the average: of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear, column_parallel, dividing_shard, row_parallel
from headrace_models.layers.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.state_layer import StateArguments


class TimeMixing(RecurrentLayer):
    """``out(sigmoid(receptance) * wkv(key, value))``: what stands for attention. Channels of the average
    are spread over the ranks."""

    def __init__(self, context: BuildContext, name: str, hidden_size: int, channels: int) -> None:
        shard = dividing_shard(channels, context.communicator, what=f"{name}, channels")
        own = Part(channels // shard.count, shard)
        last = StateShape((hidden_size, 1), context.dtype)
        super().__init__(context, name, (last, last, last, StateShape((3, own.size), "float32")))
        self.ops = context.ops
        self.mix = TokenShift(context, name, ("key", "value", "receptance"), hidden_size)
        self.key = column_parallel(context, f"{name}.key", hidden_size, (channels,))
        self.value = column_parallel(context, f"{name}.value", hidden_size, (channels,))
        self.receptance = column_parallel(context, f"{name}.receptance", hidden_size, (channels,))
        self.average = WeightedAverage(context, name, own)
        self.output = row_parallel(context, f"{name}.output", channels, hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        mixed = self.mix(x, [self.state(index, batch) for index in range(3)])
        key, value = self.key(mixed[0]), self.value(mixed[1])
        out = self.average(key, value, self.state(3, batch))
        return self.output(self.ops.gate(out, self.receptance(mixed[2]), activation="sigmoid"))


class ChannelMixing(RecurrentLayer):
    """``sigmoid(receptance) * value(relu(key)^2)``: what stands for the MLP. The inner channels are spread
    over the ranks; every rank has all of the gate."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, intermediate_size: int
    ) -> None:
        last = StateShape((hidden_size, 1), context.dtype)
        super().__init__(context, name, (last, last))
        self.ops = context.ops
        self.mix = TokenShift(context, name, ("key", "receptance"), hidden_size)
        self.key = column_parallel(context, f"{name}.key", hidden_size, (intermediate_size,))
        self.receptance = Linear(context, f"{name}.receptance", hidden_size, [Part(hidden_size)])
        self.value = row_parallel(context, f"{name}.value", intermediate_size, hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        mixed = self.mix(x, [self.state(index, batch) for index in range(2)])
        value = self.value(self.key.activated(mixed[0], "relu2"))
        return self.ops.gate(value, self.receptance(mixed[1]), activation="sigmoid")


class TokenShift(WeightLayer):
    """``m x_t + (1 - m) x_{t - 1}``, a convolution of two taps, with an m for each purpose.

    Args:
        purposes: as the checkpoint spells them.
    """

    def __init__(
        self, context: BuildContext, name: str, purposes: Sequence[str], channels: int
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.purposes, self.channels = tuple(purposes), channels
        self.taps: list[Tensor] = []

    def slots(self) -> Mapping[str, Slot]:
        return {f"time_mix_{purpose}": Slot((1, 1, self.channels)) for purpose in self.purposes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        shares = [tensors[f"time_mix_{purpose}"].flatten() for purpose in self.purposes]
        self.taps = [torch.stack((1 - share, share)).contiguous().T for share in shares]

    def __call__(self, x: Tensor, states: Sequence[StateArguments]) -> list[Tensor]:
        """x [T, C] -> the same shape, for each purpose."""
        conv = self.ops.causal_conv
        return [conv(x, taps, None, *state) for taps, state in zip(self.taps, states)]


class WeightedAverage(WeightLayer):
    """See :class:`headrace_core.ops.WKVOp`.

    Args:
        own: the channels that this rank keeps.
    """

    def __init__(self, context: BuildContext, name: str, own: Part) -> None:
        self.name = name
        self.ops = context.ops
        self.own = own

    def slots(self) -> Mapping[str, Slot]:
        each = Slot((self.own.size,), "float32", parts=(self.own,), any_float=True)
        return {"time_decay": each, "time_first": each}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.decay, self.first = -torch.exp(tensors["time_decay"]), tensors["time_first"]

    def __call__(self, key: Tensor, value: Tensor, state: StateArguments) -> Tensor:
        """key, value [T, C] -> the same shape."""
        return self.ops.wkv(key, value, self.decay, self.first, *state)
