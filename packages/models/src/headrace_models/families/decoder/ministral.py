"""Ministral 8B: Mistral with windows on some layers only. Mistral AI 2024."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class MinistralForCausalLM(LlamaDecoder):
    """Without ``layer_types`` all layers have the window."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        kinds = self.settings.layer_types()
        sliding = kinds is None or kinds[index] == "sliding_attention"
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window if sliding else None)
