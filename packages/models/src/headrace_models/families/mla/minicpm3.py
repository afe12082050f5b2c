"""MiniCPM 3: latent attention with ordinary rotary pairs, and MiniCPM's multipliers.

Hu et al. 2024, arXiv:2404.06395; latent attention: DeepSeek-AI 2024, arXiv:2405.04434.

Block: ``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ScaledBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import MLADecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class MiniCPM3ForCausalLM(MLADecoder):
    """MiniCPM3-4B."""

    ties_embeddings: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-5

    def value_size(self) -> int:
        """Absent from the published config: what heads of the hidden size would have."""
        if self.context.config.get("v_head_dim") is not None:
            return super().value_size()
        return self.hidden_size() // self.settings.integer("num_attention_heads")

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.settings.number("scale_emb", 12.0))

    def logits_multiplier(self) -> float:
        hidden = self.hidden_size()
        return self.settings.integer("dim_model_base", hidden) / hidden

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.mla_attention(context, name, interleaved=False)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        depth = math.sqrt(self.num_layers())
        return ScaledBlock(
            context.ops,
            self.settings.number("scale_depth", depth) / depth,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )
