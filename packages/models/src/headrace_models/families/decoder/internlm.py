"""InternLM 1 and openPangu Embedded: Llama with biases around its attention.

InternLM Team 2023, "InternLM: A Multilingual Language Model with Progressively Enhanced Capabilities";
Huawei 2025, arXiv:2505.22375.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_models.config.settings import Settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class InternLMForCausalLM(LlamaDecoder):
    """Its ``bias`` is that of the four projections; the MLP has none. The first configs have an object
    ``rotary`` with the base."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        stated = self.settings.config.get("rotary")
        own = Settings(stated if isinstance(stated, Mapping) else {})
        own.refuse("type", "origin", "dynamic")  # beyond the trained context only they differ
        if own.config.get("base") is not None:
            self.settings.config["rope_theta"] = own.positive("base")
        super().prepare(context, prefix)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)
