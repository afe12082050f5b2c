"""Gemma 1: Llama with norms stored less 1, scaled embeddings and a gated tanh-GELU.

Gemma Team 2024, arXiv:2403.08295.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GemmaForCausalLM(LlamaForCausalLM):
    """Text model of Gemma 1, and what later Gemmas keep of it."""

    ties_embeddings: ClassVar[bool] = True

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        # Rounded to the activations' dtype first, as the model was trained.
        dtype: torch.dtype = getattr(torch, context.dtype)
        self.embed_scale = float(torch.tensor(self.hidden_size() ** 0.5, dtype=dtype))

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
