"""OLMo 1: Llama with LayerNorms that have no weights, and clipped projections.

Groeneveld et al. 2024, arXiv:2402.00838.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

EPS = 1e-5
"""No config names it."""


class OlmoForCausalLM(LlamaDecoder):
    """OLMo 1B and 7B, 0424 and 0724 included."""

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), EPS, weight=False, bias=False)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        clip = self.settings.optional_positive("clip_qkv")
        return self.attention(context, name, clip=clip, qkv_bias=bias, out_bias=bias)
