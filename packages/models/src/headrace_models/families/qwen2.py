"""Qwen2, Qwen2.5, QwQ: Llama with biased query, key and value, and windows on upper layers.

Yang et al. 2024, arXiv:2407.10671.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.settings import Settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Windows only if ``use_sliding_window``; then by ``layer_types`` or ``max_window_layers``."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = upper_layer_window(self.settings, index)
        return self.attention(context, name, sliding_window=window, qkv_bias=True)


def upper_layer_window(settings: Settings, index: int) -> int | None:
    """The window of layer ``index``, as Qwen's configs state it."""
    window = settings.optional_integer("sliding_window")
    if window is None or not settings.flag("use_sliding_window", False):
        return None
    kinds = settings.layer_types()
    if kinds is not None:
        return window if kinds[index] == "sliding_attention" else None
    return window if index >= settings.integer("max_window_layers", 28, minimum=0) else None
