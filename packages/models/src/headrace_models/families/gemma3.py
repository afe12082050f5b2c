"""Gemma 3, text: Gemma 2's sandwich, head norms instead of soft caps, five windows to one full layer.

Windowed and full layers rotate by different bases. Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gemma2 import GEMMA_RULES, Gemma2ForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import of_windows, rope_settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
DEFAULT_PATTERN = 6
"""Every sixth layer is full."""


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Text model of Gemma 3."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*GEMMA_RULES, *HEAD_NORM_RULES)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size = self.head_dim()
        limit = self.settings.integer("max_position_embeddings", 131_072)
        rope = rope_settings(context.config, "full_attention", theta=GLOBAL_THETA)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)
        local = rope_settings(
            of_windows(context.config, context.config.get("rope_local_base_freq", LOCAL_THETA)),
            "sliding_attention",
            theta=LOCAL_THETA,
        )
        self.local_rotary = rotary_table(context, local, size, max_positions=limit)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        pattern = self.settings.integer("sliding_window_pattern", DEFAULT_PATTERN)
        return (index + 1) % pattern != 0

    def window(self) -> int:
        """In both directions the config's number is the whole width, half of it to either side."""
        window = self.settings.integer("sliding_window", 4096)
        bidirectional = self.settings.flag("use_bidirectional_attention", False)
        return window // 2 if bidirectional else window

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        sliding = self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.local_rotary if sliding else self.rotary,
            scale=self.settings.positive("query_pre_attn_scalar", 256) ** -0.5,
            sliding_window=self.window() if sliding else None,
            soft_cap=self.settings.optional_positive("attn_logit_softcapping") or 0.0,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.settings.number("rms_norm_eps", 1e-6),
            head_norm_offset=1.0,
        )
