"""OLMo 3: OLMo 2 with windows on three of four layers, whose positions are never scaled.

Team OLMo 2025, arXiv:2512.13961.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.families.olmo2 import Olmo2ForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import of_windows, rope_settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

FULL_EVERY = 4
"""Without ``layer_types``, the last of every four layers has no window."""


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3 7B and 32B."""

    default_theta: ClassVar[float] = 500_000.0

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, config = self.head_dim(), context.config
        limit = self.settings.integer("max_position_embeddings", 2048)
        rope = rope_settings(config, "full_attention", theta=self.default_theta)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)
        theta = self.settings.positive("rope_theta", self.default_theta)
        local = rope_settings(of_windows(config, theta), "sliding_attention", theta=theta)
        self.local_rotary = rotary_table(context, local, size, max_positions=limit)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is None:
            return (index + 1) % FULL_EVERY != 0
        return kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if not self.is_sliding(index):
            return self.normed_attention(context, name)
        window = self.settings.integer("sliding_window", 4096)
        return self.normed_attention(context, name, rotary=self.local_rotary, sliding_window=window)
