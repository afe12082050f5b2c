"""Qwen2, Qwen2.5, QwQ: Llama with biased query, key and value, and windows on upper layers.

Yang et al. 2024, arXiv:2407.10671.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen2ForCausalLM(LlamaDecoder):
    """Windows only if ``use_sliding_window``; then by ``layer_types`` or ``max_window_layers``."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = upper_layer_window(self.settings, index)
        return self.attention(context, name, sliding_window=window, qkv_bias=True)
