"""Solar Open: GLM-4.5's attention, and mixtures of experts in every layer, routed as DeepSeek V3's.

Upstage 2025, Solar-Open-100B.
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


class SolarOpenForCausalLM(MoEDecoder):
    """Solar-Open-100B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*MOE_RULES, *HEAD_NORM_RULES)
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED
    default_theta: ClassVar[float] = 1e6
    default_eps: ClassVar[float] = 1e-5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        normed = self.settings.flag("use_qk_norm", False)
        return self.attention(
            context,
            name,
            qkv_bias=self.settings.flag("attention_bias", False),
            head_norm_eps=self.norm_eps() if normed else None,
        )

    def is_dense(self, index: int) -> bool:
        return False
