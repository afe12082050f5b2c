"""ERNIE 4.5, dense: Llama with neighbours as rotary pairs, and biases everywhere or nowhere.

Baidu 2025, ERNIE 4.5 technical report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Ernie4_5ForCausalLM(LlamaDecoder):
    """ERNIE-4.5-0.3B."""

    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def has_bias(self) -> bool:
        return self.settings.flag("use_bias", False)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.has_bias()
        return self.attention(context, name, interleaved=True, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=self.has_bias(),
        )
