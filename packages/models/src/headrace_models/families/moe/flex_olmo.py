"""FlexOlmo: OLMo 2 with mixtures of experts. Shi et al. 2025, arXiv:2507.07024.

Block: ``h = x + norm(attention(x)); h + norm(experts(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PostNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import whole_norms
from headrace_models.layers.decoders.moe import MoEDecoder, softmax_routing
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import POST_NORM_RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class FlexOlmoForCausalLM(MoEDecoder):
    """FlexOlmo-7x7B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *POST_NORM_RULES,
        *router_rules(),
        *expert_rules(),
    )
    default_theta: ClassVar[float] = 500_000.0

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PostNormBlock(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With norms over all heads of query and of key together."""
        bias, norms = self.settings.flag("attention_bias", False), whole_norms(self, context, name)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias, **norms)

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, top_k=5)

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")
