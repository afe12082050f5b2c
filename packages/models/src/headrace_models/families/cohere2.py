"""Cohere Command R7B and A: windows with positions on three of four layers, neither on the fourth.

Cohere 2025, arXiv:2504.00698.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.cohere import PARALLEL_RULES, CohereForCausalLM
from headrace_models.layers.attention import SelfAttention

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

DEFAULT_PATTERN = 4


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B, Command A."""

    weight_rules: ClassVar[Sequence[WeightRule]] = PARALLEL_RULES
    default_theta: ClassVar[float] = 10_000.0

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return (index + 1) % self.settings.integer("sliding_window_pattern", DEFAULT_PATTERN) != 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, sliding = self.settings.flag("attention_bias", False), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding else None,
            interleaved=True,
            sliding_window=self.settings.integer("sliding_window", 4096) if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
        )
