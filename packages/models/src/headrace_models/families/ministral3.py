"""Ministral 3: Mistral whose queries grow with their position, so that long contexts stay sharp.

Mistral AI 2026, arXiv:2601.08584; the factor is Llama 4's (Meta 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.rope import rope_settings, scaling_block
from headrace_models.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 3B to 14B, text."""

    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.temperature = query_temperature(context)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context, name, sliding_window=window, query_temperature=self.temperature
        )


def query_temperature(context: BuildContext) -> Tensor | None:
    """[P] float32: ``1 + beta * log(1 + position // original context)``; None without beta."""
    block = Settings(scaling_block(context.config))
    if block.config.get("llama_4_scaling_beta") is None:
        return None
    beta = block.number("llama_4_scaling_beta")
    if beta < 0:
        raise UnsupportedModel(
            f"config.json: llama_4_scaling_beta = {beta:g}: must be a number of at least 0"
        )
    original = rope_settings(context.config).original_max_position_embeddings
    positions = torch.arange(context.max_model_len, dtype=torch.float32)
    return (1 + beta * torch.log1p(positions // original)).to(context.device)
