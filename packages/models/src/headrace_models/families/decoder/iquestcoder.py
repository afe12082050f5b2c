"""IQuest-Coder V1: Llama that may clip its projections and have windows on upper layers.

IQuest Research 2026, IQuest-Coder-V1. Its published checkpoints do neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class IQuestCoderForCausalLM(LlamaDecoder):
    """7B, 14B and 40B."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            clip=self.settings.optional_positive("clip_qkv"),
            sliding_window=upper_layer_window(self.settings, index),
            qkv_bias=bias,
            out_bias=bias,
        )
