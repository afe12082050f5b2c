"""Helium: Llama with neighbours as rotary pairs. Kyutai 2025, Helium 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class HeliumForCausalLM(LlamaDecoder):
    """Helium 1."""

    default_theta: ClassVar[float] = 100_000.0
    default_eps: ClassVar[float] = 1e-8

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(context, name, interleaved=True, qkv_bias=bias)
