"""Gemma 1: Llama with norms stored less 1, scaled embeddings and a gated tanh-GELU.

Gemma Team 2024, arXiv:2403.08295.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.decoders.gemma import embedding_scale
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GemmaForCausalLM(LlamaDecoder):
    """Text model of Gemma 1. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    ties_embeddings: ClassVar[bool] = True

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.embed_scale = embedding_scale(context, self.hidden_size())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=256)

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Gemma stores its norms' weights less 1."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embed_scale)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        """The first configs write ``gelu`` and mean its tanh form."""
        activation = self.settings.activation("hidden_activation", "hidden_act")
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            "gelu_tanh" if activation == "gelu" else activation,
        )
