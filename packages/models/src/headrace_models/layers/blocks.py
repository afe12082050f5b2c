"""Blocks that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch


class NoNorm(Layer):
    """Stands where a first block has no norm, as what comes before it ends in one."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Only the first block has none: there is nothing to add yet."""
        assert residual is None
        return x, x


class PreNormBlock(Block):
    """``h = x + attention(norm(x)); h + mlp(norm(h))``: Llama, GPT-2 and most since."""

    def __init__(
        self,
        input_norm: RMSNorm | LayerNorm | NoNorm,
        attention: SelfAttention,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: MLPLayer,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


class SandwichBlock(Block):
    """Norms before and after both halves: Gemma 2 and 3."""

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: SelfAttention,
        attention_out_norm: RMSNorm,
        mlp_norm: RMSNorm,
        mlp: MLPLayer,
        mlp_out_norm: RMSNorm,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention_out_norm(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream
