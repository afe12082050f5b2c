"""MiMo: Qwen 2 whose checkpoints bring layers that guess further tokens.

Xiaomi 2025, arXiv:2505.07608.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class MiMoForCausalLM(LlamaDecoder):
    """MiMo 7B. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.mtp_layers\..*": "guesses further tokens, which is speculation's business"
    }

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = upper_layer_window(self.settings, index)
        return self.attention(context, name, sliding_window=window, qkv_bias=True)
