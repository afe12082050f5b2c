"""Several streams through a stack of blocks, one of which each block works on: alternating updates.

Baykal et al. 2023, arXiv:2301.13310, as Gemma 3n has it. There are no ops for the mixing of streams: it
is torch's, so steps of such models are not captured.

Letters: N streams, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

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
        self.active, self.hidden_size = active, hidden_size
        count = num_streams
        self.router_norm = RMSNorm(context, f"{name}.router_norm", hidden_size, eps)
        self.router = PlainLinear(context, f"{name}.modality_router", hidden_size, count)
        self.prediction = PlainLinear(context, f"{name}.prediction_coefs", count, count**2)
        self.correction = PlainLinear(context, f"{name}.correction_coefs", count, count)
        self.output_scale = OutputScale(f"{name}.correct_output_scale", hidden_size)
        self.scales = scales

    def predict(self, streams: Tensor) -> Tensor:
        """[N, T, H] -> the same shape."""
        count, tokens, _ = streams.shape
        mixing = self.prediction(self._modes(streams[self.active])).view(tokens, count, count)
        return streams + torch.einsum("tmn,nth->mth", mixing, streams)

    def correct(self, predictions: Tensor, made: Tensor) -> Tensor:
        """predictions [N, T, H], made [T, H] of the active one -> [N, T, H]."""
        shares = self.correction(self._modes(made)) + 1
        return predictions + shares.T[:, :, None] * (made - predictions[self.active])

    def output(self, streams: Tensor) -> Tensor:
        """The active stream, [T, H], scaled if the model does that."""
        active = streams[self.active]
        return active * self.output_scale.weight if self.scales else active

    def _modes(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, N]."""
        return torch.tanh(self.router(self.router_norm(x) / self.hidden_size))


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

        self.spread = projections("altup_projections")
        self.gather = projections("altup_unembed_projections")

    def expand(self, x: Tensor) -> Tensor:
        """[T, H] -> [N, T, H], all of x's magnitude."""
        return torch.stack([x, *(_as_large(layer(x), x) for layer in self.spread)])

    def mean(self, streams: Tensor) -> Tensor:
        """[N, T, H] -> [T, H]: of all, once they have the first one's magnitude."""
        first = streams[0]
        others = zip(self.gather, streams[1:])
        return torch.stack(
            [first, *(_as_large(layer(stream), first) for layer, stream in others)]
        ).mean(0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x [T, H] times what gives each row the root mean square of ``like``'s."""
    target = like.square().mean(-1, keepdim=True).sqrt()
    return x * target / x.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
