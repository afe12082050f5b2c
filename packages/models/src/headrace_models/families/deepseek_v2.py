"""DeepSeek V2 and V2-Lite: latent attention, experts chosen by a softmax within the best groups.

DeepSeek-AI 2024, arXiv:2405.04434.
"""

from __future__ import annotations

from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.layers.router import Routing
from headrace_models.settings import MAX_EXPERTS

METHODS = ("greedy", "group_limited_greedy")


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """V3's structure; the choice has no correction."""

    def is_corrected(self) -> bool:
        return False

    def routing(self) -> Routing:
        """The probabilities of the chosen are divided by their sum, or multiplied by the factor: one
        of the two, as the published code does."""
        settings = self.settings
        method = settings.choice("topk_method", METHODS, "greedy")
        grouped = method == "group_limited_greedy"
        renormalise = settings.flag("norm_topk_prob", False)
        return Routing(
            num_experts=settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
            top_k=settings.integer("num_experts_per_tok"),
            scoring=settings.choice("scoring_func", ("softmax",), "softmax"),
            renormalise=renormalise,
            scale=1.0 if renormalise else settings.positive("routed_scaling_factor", 1.0),
            num_groups=settings.integer("n_group") if grouped else 1,
            top_groups=settings.integer("topk_group") if grouped else 1,
        )
