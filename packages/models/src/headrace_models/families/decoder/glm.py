"""GLM-4 (9B, first series): half of each head turns, neighbours as pairs; gate and up stored as one.

Team GLM 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.loading.rules.llama import FUSED_MLP_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class GlmForCausalLM(LlamaDecoder):
    """glm-4-9b-chat-hf, glm-edge. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    weight_rules: ClassVar[Sequence[WeightRule]] = FUSED_MLP_RULES
    default_partial_rotary: ClassVar[float] = 0.5
    default_eps: ClassVar[float] = 1.5625e-7

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", True)
        return self.attention(context, name, interleaved=True, qkv_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            stored_fused=True,
        )
