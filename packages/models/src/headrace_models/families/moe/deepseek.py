"""DeepSeek-MoE (DeepSeek V1): Llama with many small experts, and some that all tokens go to.

Dai et al. 2024, arXiv:2401.06066.
"""

from __future__ import annotations

from headrace_models.layers.decoders.moe import MoEDecoder, softmax_routing
from headrace_models.layers.moe.router import Routing


class DeepseekForCausalLM(MoEDecoder):
    """DeepSeek-MoE 16B."""

    def is_dense(self, index: int) -> bool:
        every = self.settings.integer("moe_layer_freq", 1)
        return super().is_dense(index) or index % every != 0

    def routing(self, index: int) -> Routing:
        self.settings.refuse("scoring_func", "softmax")
        return softmax_routing(self.settings, experts="n_routed_experts", top_k=6)
