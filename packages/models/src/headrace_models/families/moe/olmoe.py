"""OLMoE: mixtures of experts, and norms over whole queries and keys. Muennighoff et al. 2024,
arXiv:2409.02060.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import whole_norms
from headrace_models.layers.decoders.moe import MOE_RULES, MoEDecoder, softmax_routing
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import HEAD_NORM_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class OlmoeForCausalLM(MoEDecoder):
    """OLMoE-1B-7B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*MOE_RULES, *HEAD_NORM_RULES)
    default_eps: ClassVar[float] = 1e-5

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, top_k=8)

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        self.settings.refuse("clip_qkv")
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            **whole_norms(self, context, name),
        )
