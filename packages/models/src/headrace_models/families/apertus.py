"""Apertus: Llama with head norms and an MLP without a gate, whose activation is learned.

Swiss AI Initiative 2025, arXiv:2509.14233.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.arcee import UNGATED_RULES, ArceeForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.xielu import XIELUMLP

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class ApertusForCausalLM(ArceeForCausalLM):
    """Apertus 8B and 70B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in UNGATED_RULES if not rule.target.endswith(("input_norm", "mlp_norm"))),
        *HEAD_NORM_RULES,
        WeightRule("model.layers.{}.attention_layernorm", "layers.{}.input_norm"),
        WeightRule("model.layers.{}.feedforward_layernorm", "layers.{}.mlp_norm"),
        WeightRule("model.layers.{}.mlp.act_fn", "layers.{}.mlp.activation"),
    )
    default_theta: ClassVar[float] = 12_000_000.0

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.attention_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        eps = self.norm_eps()
        return self.attention(context, name, qkv_bias=bias, out_bias=bias, head_norm_eps=eps)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        self.settings.refuse("hidden_act", "xielu")
        size = self.settings.integer("intermediate_size")
        return XIELUMLP(context, name, self.hidden_size(), size)
