"""Gemma 2: norms on both sides, soft-capped scores and logits, windows on every other layer.

Gemma Team 2024, arXiv:2408.00118.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gemma import GemmaForCausalLM
from headrace_models.families.llama import RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import GatedMLP, MLPLayer

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

GEMMA_RULES = (
    *(rule for rule in RULES if not rule.target.endswith("mlp_norm")),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.attention_out_norm"),
    WeightRule("model.layers.{}.pre_feedforward_layernorm", "layers.{}.mlp_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
)
"""Llama's, but ``post_attention_layernorm`` really stands after the attention."""


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Text model of Gemma 2."""

    weight_rules: ClassVar[Sequence[WeightRule]] = GEMMA_RULES

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        return index % 2 == 0 if kinds is None else kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context,
            name,
            scale=self.settings.positive("query_pre_attn_scalar", 256) ** -0.5,
            sliding_window=window if self.is_sliding(index) else None,
            soft_cap=self.settings.optional_positive("attn_logit_softcapping") or 0.0,
            qkv_bias=bias,
            out_bias=bias,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_activation", "hidden_act"),
        )
