"""Several streams through a stack of blocks, one of which each block works on: alternating updates.

Baykal et al. 2023, arXiv:2301.13310, as Gemma 3n has it. Letters: N streams, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_core.ops.optional.match_rms import MATCH_RMS
from headrace_core.ops.optional.mix import MIX
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

_LEAST = 1e-5
"""Least mean square of a stream that is brought to another's magnitude."""


class OutputScale(WeightLayer):
    """A factor for each of H values."""

    weight: Tensor

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


class Coefficients(WeightLayer):
    """``weight @ modes + plus``: how much of each stream goes where, in float32.

    Args:
        count: N, of the modes too.
        size: of the coefficients.
    """

    packed: PackedLinear
    bias: Tensor

    def __init__(
        self, context: BuildContext, name: str, count: int, size: int, *, plus: float = 0.0
    ) -> None:
        self.name, self.ops = name, context.ops
        self.shape, self.plus = (size, count), plus

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape, "float32", any_float=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]
        self.packed = self.ops.linear.pack(weight)
        self.bias = torch.full_like(weight[:, 0], self.plus)

    def __call__(self, modes: Tensor) -> Tensor:
        """modes [T, N] float32 -> [T, size] float32."""
        return self.ops.linear(modes, self.packed, self.bias)


class AltUp(Layer):
    """Predicts what a block will make of all streams, and corrects that by what it made of one.

    Args:
        name: as the checkpoint spells it.
        active: the stream that blocks work on.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_streams: int,
        active: int,
        eps: float,
        scales: bool,
    ) -> None:
        self.ops, self.mix = context.ops, context.ops.optional(MIX)
        self.active, self.hidden_size = active, hidden_size
        count = num_streams
        self.router_norm = RMSNorm(context, f"{name}.router_norm", hidden_size, eps)
        self.router = PlainLinear(context, f"{name}.modality_router", hidden_size, count)
        self.prediction = Coefficients(context, f"{name}.prediction_coefs", count, count**2)
        self.correction = Coefficients(context, f"{name}.correction_coefs", count, count, plus=1.0)
        self.output_scale = OutputScale(f"{name}.correct_output_scale", hidden_size)
        self.scales = scales
        self.but_first = torch.ones(count, device=context.device)
        self.but_first[0] = 0

    def predict(self, streams: Tensor) -> Tensor:
        """[T, N, H] -> the same shape."""
        tokens, count, _ = streams.shape
        mixing = self.prediction(self._modes(self.of(streams))).view(tokens, count, count)
        return self.mix(streams, mixing, streams)

    def correct(self, predictions: Tensor, made: Tensor) -> Tensor:
        """predictions [T, N, H], made [T, H] of the active one -> [T, N, H]."""
        shares = self.correction(self._modes(made))
        unexpected = self.ops.add(made, self.ops.scale(self.of(predictions), -1.0))
        return self.mix(unexpected[:, None], shares[..., None], predictions)

    def of(self, streams: Tensor) -> Tensor:
        """The active one, [T, H], a view."""
        return streams[:, self.active]

    def output(self, streams: Tensor) -> Tensor:
        """The active stream, [T, H], scaled if the model does that."""
        active = self.of(streams)
        if not self.scales:
            return active
        return self.ops.gate(active, in_every_row(self.output_scale.weight, active.shape[0]))

    def add(self, streams: Tensor, x: Tensor) -> Tensor:
        """x [T, H] to all streams [T, N, H] but the first."""
        shares = in_every_row(self.but_first, x.shape[0])
        return self.mix(x[:, None], shares[..., None], streams)

    def _modes(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, N] float32: tanh of the router's outputs."""
        routed = self.router(self.ops.scale(self.router_norm(x), 1 / self.hidden_size))
        return self.ops.to_float32(routed, soft_cap=1.0)


class Streams(Layer):
    """From one stream to N and back.

    Args:
        prefix: of the checkpoint's names.
    """

    def __init__(
        self, context: BuildContext, prefix: str, hidden_size: int, num_streams: int
    ) -> None:
        def projections(name: str) -> list[PlainLinear]:
            names = [f"{prefix}{name}.{index}" for index in range(num_streams - 1)]
            return [PlainLinear(context, full, hidden_size, hidden_size) for full in names]

        self.ops = context.ops
        self.mix, self.match_rms = self.ops.optional(MIX), self.ops.optional(MATCH_RMS)
        self.spread = projections("altup_projections")
        self.gather = projections("altup_unembed_projections")
        self.shares = torch.full((num_streams,), 1 / num_streams, device=context.device)

    def expand(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, N, H], all of x's magnitude."""
        streams = x.new_empty((x.shape[0], len(self.spread) + 1, x.shape[1]))
        self.ops.copy_rows(x, streams[:, 0])
        for index, layer in enumerate(self.spread, start=1):
            self.ops.copy_rows(self.match_rms(layer(x), x, _LEAST), streams[:, index])
        return streams

    def mean(self, streams: Tensor) -> Tensor:
        """[T, N, H], given up -> [T, H]: of all, once they have the first one's magnitude."""
        first = streams[:, 0]
        for index, layer in enumerate(self.gather, start=1):
            own = streams[:, index]
            self.ops.copy_rows(self.match_rms(layer(own), first, _LEAST), own)
        shares = in_every_row(self.shares, streams.shape[0])
        return self.mix(streams, shares[:, None])[:, 0]
