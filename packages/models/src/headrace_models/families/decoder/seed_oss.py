"""Seed-OSS: Llama with biases of query, key and value only. ByteDance Seed 2025."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class SeedOssForCausalLM(LlamaDecoder):
    """Seed-OSS 36B."""

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context,
            name,
            qkv_bias=self.settings.flag("attention_bias", True),
            out_bias=self.settings.flag("attention_out_bias", False),
        )
