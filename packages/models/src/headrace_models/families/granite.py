"""Granite 3, PowerLM: Llama with four multipliers, of the embeddings, the scores, what each half of a
block adds, and the logits.

IBM 2024, Granite 3.0 language models; the multipliers are those of Yang et al. 2022, arXiv:2203.03466.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import ScaledBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite 3.0 to 3.3, dense."""

    def token_vectors(self, ids: Tensor) -> Tensor:
        multiplier = self.settings.number("embedding_multiplier", 1.0)
        return self.context.ops.scale(self.embed(ids), multiplier)

    def logits_multiplier(self) -> float:
        return 1.0 / self.settings.positive("logits_scaling", 1.0)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ScaledBlock(
            context.ops,
            self.settings.number("residual_multiplier", 1.0),
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        scale = self.score_multiplier()
        return self.attention(context, name, scale=scale, qkv_bias=bias, out_bias=bias)

    def score_multiplier(self) -> float:
        """What scores are multiplied by."""
        return self.settings.number("attention_multiplier", 1.0)
