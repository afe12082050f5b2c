"""Mistral 4 and Mistral Large 3: DeepSeek V3 with experts chosen by a softmax, and queries that grow with
their position.

Mistral AI 2025, Mistral Large 3; the factor is Llama 4's (Meta 2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.families.ministral3 import query_temperature
from headrace_models.layers.router import Routing
from headrace_models.rope import RopeSettings, rope_settings
from headrace_models.settings import MAX_EXPERTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention import SelfAttention


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    """Text models in the layout of transformers."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.temperature = query_temperature(context)

    def rope_settings(self, context: BuildContext) -> RopeSettings:
        """The config's share of a head that turns is the part that is all turned here."""
        return replace(rope_settings(context.config), partial_rotary_factor=1.0)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.latent_attention(context, name, query_temperature=self.temperature)

    def routing(self) -> Routing:
        settings = self.settings
        settings.refuse("scoring_func", "softmax")
        return Routing(
            num_experts=settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
            top_k=settings.integer("num_experts_per_tok"),
            renormalise=settings.flag("norm_topk_prob", True),
            scale=settings.positive("routed_scaling_factor", 1.0),
            num_groups=settings.integer("n_group", 1),
            top_groups=settings.integer("topk_group", 1),
            group_score="top2",
        )

    def is_corrected(self) -> bool:
        return False
