"""Blocks of models in which attention and recurrences take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.state_layer import TokenMixer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


class MixerBlock(Block):
    """``x + mixer(norm(x))``: Mamba, and what has its MLPs in blocks of their own."""

    def __init__(self, norm: RMSNorm, mixer: TokenMixer | SelfAttention | MLPLayer) -> None:
        self.norm = norm
        self.mixer: Layer = mixer

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.norm.add(x, residual)
        mixer = self.mixer
        if isinstance(mixer, MLPLayer):
            return mixer(x), stream
        assert isinstance(mixer, TokenMixer | SelfAttention)
        return mixer(x, batch), stream


class HybridBlock(Block):
    """``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being attention or a recurrence."""

    def __init__(
        self,
        input_norm: RMSNorm,
        mixer: TokenMixer | SelfAttention,
        mlp_norm: RMSNorm,
        mlp: MLPLayer,
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
