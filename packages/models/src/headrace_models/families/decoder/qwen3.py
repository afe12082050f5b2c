"""Qwen3: Llama with norms over each query and key head. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen3ForCausalLM(LlamaDecoder):
    """Dense Qwen3."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *HEAD_NORM_RULES)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def sliding_window(self, index: int) -> int | None:
        return upper_layer_window(self.settings, index)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            sliding_window=self.sliding_window(index),
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.settings.number("rms_norm_eps", 1e-6),
        )
