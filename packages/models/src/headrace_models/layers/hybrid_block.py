"""Blocks of models in which attention and recurrences take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.ops import OpTable


class Mixer(Protocol):
    """What mixes a request's tokens: attention or a recurrence; a layer."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        ...


class MixerBlock(Block):
    """``x + mixer(norm(x))``: Mamba, and what has its MLPs in blocks of their own."""

    def __init__(self, norm: NormLayer, mixer: Mixer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.norm.add(x, residual)
        return self.mixer(x, batch), stream


class FeedForwardBlock(Block):
    """``x + mlp(norm(x))``: stands between blocks of mixers."""

    def __init__(self, norm: NormLayer, mlp: MLPLayer) -> None:
        self.norm = norm
        self.mixer = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.norm.add(x, residual)
        return self.mixer(x), stream


class HybridBlock(Block):
    """``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being attention or a recurrence."""

    def __init__(
        self, input_norm: NormLayer, mixer: Mixer, mlp_norm: NormLayer, mlp: MLPLayer
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.mixer(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


class SandwichHybridBlock(Block):
    """Norms before and after both halves, the mixer being attention or a recurrence (PLaMo 2)."""

    def __init__(
        self,
        input_norm: NormLayer,
        mixer: Mixer,
        mixer_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mixer_out_norm = mixer_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.mixer_out_norm(self.mixer(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class ScaledHybridBlock(HybridBlock):
    """What both halves add is multiplied by a number (Granite 4).

    Args:
        scale: the number.
    """

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        mixer: Mixer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        super().__init__(input_norm, mixer, mlp_norm, mlp)
        self.ops, self.scale = ops, scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.mixer(x, batch), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp(x), self.scale), stream
