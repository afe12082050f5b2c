"""K-EXAONE: EXAONE 4's attention in pre-norm blocks, mixtures of experts routed as DeepSeek V3's.

LG AI Research 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import (
    CORRECTED,
    MOE_RULES,
    MoEDecoder,
    deepseek_routing,
    is_dense_by_list,
)
from headrace_models.layers.decoders.windows import has_window_by_pattern
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import HEAD_NORM_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class ExaoneMoeForCausalLM(MoEDecoder):
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
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With a norm for each head; a layer without a window has no positions, if others have one."""
        window = self.settings.optional_integer("sliding_window")
        sliding = has_window_by_pattern(self.settings, index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding or window is None else None,
            sliding_window=window if sliding else None,
            head_norm_eps=self.norm_eps(),
        )

    def is_dense(self, index: int) -> bool:
        first = self.settings.integer("first_k_dense_replace", 1, minimum=0)
        return is_dense_by_list(self.settings, index, first)

    def routing(self, index: int) -> Routing:
        return deepseek_routing(self.settings, experts="num_experts", scale=2.5)

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("num_shared_experts", 1, minimum=0)
        return self.expert_size(index) * count
