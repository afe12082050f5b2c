"""FlexOlmo: OLMo 2 with mixtures of experts. Shi et al. 2025, arXiv:2507.07024."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.moe_rules import expert_rules, router_rules
from headrace_models.families.moe_shape import MoEDecoder, softmax_routing
from headrace_models.families.olmo2 import POST_NORM_RULES, Olmo2ForCausalLM
from headrace_models.layers.router import Routing


class FlexOlmoForCausalLM(Olmo2ForCausalLM, MoEDecoder):
    """FlexOlmo-7x7B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *POST_NORM_RULES,
        *router_rules(),
        *expert_rules(),
    )
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-6

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, top_k=5)

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")
