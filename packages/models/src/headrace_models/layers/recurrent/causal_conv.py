"""Convolution over a request's last tokens, each channel by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments


class CausalConv(WeightLayer):
    """See :class:`headrace_core.ops.CausalConvOp`. The checkpoint's weight is [C, 1, K].

    Args:
        parts: the channels that this rank keeps, in the order of the input.
        taps: K.
        activation: of :data:`headrace_core.ops.ACTIVATIONS`, or None.
        multipliers: of the inputs, one for each part (Falcon-H1); empty: none.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        context: BuildContext,
        name: str,
        parts: Sequence[Part],
        taps: int,
        *,
        bias: bool,
        activation: str | None,
        multipliers: Sequence[float] = (),
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.parts = tuple(parts)
        self.taps, self.has_bias, self.activation = taps, bias, activation
        self.multipliers = tuple(multipliers)
        self.dtype = context.dtype

    @property
    def channels(self) -> int:
        return sum(part.size for part in self.parts)

    def state_shape(self) -> StateShape:
        """The inputs that the next token needs."""
        return StateShape((self.channels, self.taps - 1), self.dtype)

    def slots(self) -> Mapping[str, Slot]:
        wanted = {"weight": Slot((self.channels, 1, self.taps), parts=self.parts)}
        if self.has_bias:
            wanted["bias"] = Slot((self.channels,), parts=self.parts)
        return wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"].squeeze(1)
        if self.multipliers:  # a product with an input is one with its taps
            sizes = [part.size for part in self.parts]
            parts = zip(torch.split(weight, sizes), self.multipliers)
            weight = torch.cat([part * factor for part, factor in parts])
        self.weight = weight.T.contiguous().T  # [C, K], the channels side by side
        self.bias = tensors.get("bias")

    def __call__(self, x: Tensor, state: StateArguments) -> Tensor:
        """x [T, C] (rows may lie apart) -> the same shape."""
        return self.ops.causal_conv(x, self.weight, self.bias, *state, activation=self.activation)
