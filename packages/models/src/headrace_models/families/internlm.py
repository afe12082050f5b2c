"""InternLM 1 and openPangu Embedded: Llama with biases around its attention.

InternLM Team 2023, "InternLM: A Multilingual Language Model with Progressively Enhanced Capabilities";
Huawei 2025, arXiv:2505.22375.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class InternLMForCausalLM(LlamaForCausalLM):
    """Its ``bias`` is that of the four projections; the MLP has none."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)
