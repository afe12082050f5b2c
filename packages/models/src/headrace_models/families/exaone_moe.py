"""K-EXAONE: EXAONE 4's attention in pre-norm blocks, mixtures of experts routed as DeepSeek V3's.

LG AI Research 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.exaone4 import Exaone4ForCausalLM
from headrace_models.families.glm4_moe import CORRECTED
from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.families.moe_shape import (
    MOE_RULES,
    MoEDecoder,
    deepseek_routing,
    is_dense_by_list,
)
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.decoder import Block
from headrace_models.layers.router import Routing

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class ExaoneMoeForCausalLM(Exaone4ForCausalLM, MoEDecoder):
    """K-EXAONE-236B-A23B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        *HEAD_NORM_RULES,
        WeightRule(
            "model.layers.{}.mlp.e_score_correction_bias", "layers.{}.mlp.router.correction"
        ),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {r"mtp\..*": "predicts several tokens at once"}
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return LlamaForCausalLM.make_block(self, context, index, name)

    def is_dense(self, index: int) -> bool:
        first = self.settings.integer("first_k_dense_replace", 1, minimum=0)
        return is_dense_by_list(self.settings, index, first)

    def routing(self, index: int) -> Routing:
        return deepseek_routing(self.settings, experts="num_experts", scale=2.5)

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("num_shared_experts", 1, minimum=0)
        return self.expert_size(index) * count
