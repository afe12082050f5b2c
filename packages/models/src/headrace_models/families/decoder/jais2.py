"""Jais 2: LayerNorm, squared ReLU, biases everywhere. Inception and MBZUAI 2025."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.rules.llama import NON_GATED_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Jais2ForCausalLM(LlamaDecoder):
    """Jais 2. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    weight_rules: ClassVar[Sequence[WeightRule]] = NON_GATED_RULES

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        eps = self.settings.number("layer_norm_eps", 1e-5)
        return LayerNorm(context, name, self.hidden_size(), eps)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return MLP(
            context,
            f"{name}.up_proj",
            f"{name}.down_proj",
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=self.settings.flag("mlp_bias", True),
        )
