"""dots.llm1: Qwen3's attention, mixtures of experts routed as DeepSeek V3's. rednote-hilab 2025,
arXiv:2506.05767.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import CORRECTED, MOE_RULES, MoEDecoder, deepseek_routing
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import HEAD_NORM_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Dots1ForCausalLM(MoEDecoder):
    """dots.llm1."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*MOE_RULES, *HEAD_NORM_RULES)
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            sliding_window=self.window(index),
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.norm_eps(),
        )

    def routing(self, index: int) -> Routing:
        return deepseek_routing(self.settings, renormalise=False)

    def window(self, index: int) -> int | None:
        """The window of upper layers, as Qwen's; there is no switch."""
        window, kinds = (
            self.settings.optional_integer("sliding_window"),
            self.settings.layer_types(),
        )
        if kinds is not None:
            return window if kinds[index] == "sliding_attention" else None
        return (
            window if index >= self.settings.integer("max_window_layers", 62, minimum=0) else None
        )
