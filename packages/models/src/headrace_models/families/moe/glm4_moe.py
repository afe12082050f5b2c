"""GLM-4.5 to 4.7: mixtures of experts routed as DeepSeek V3's, head norms, half of a head turns.

Zeng et al. 2025, arXiv:2508.06471.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import CORRECTED, MOE_RULES, MoEDecoder
from headrace_models.loading.further_layers import further_layers
from headrace_models.loading.rules.llama import HEAD_NORM_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Glm4MoeForCausalLM(MoEDecoder):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*MOE_RULES, *HEAD_NORM_RULES)
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED
    default_partial_rotary: ClassVar[float] = 0.5
    default_eps: ClassVar[float] = 1e-5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        normed = self.settings.flag("use_qk_norm", False)
        return self.attention(
            context,
            name,
            qkv_bias=self.settings.flag("attention_bias", False),
            head_norm_eps=self.norm_eps() if normed else None,
        )
