"""GLM-4 (9B, first series): half of each head turns, neighbours as pairs; gate and up stored as one.

Team GLM 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

FUSED_MLP_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(".gate_up")),
    WeightRule("model.layers.{}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
)
"""Llama's, with gate and up in one tensor."""


class GlmForCausalLM(LlamaForCausalLM):
    """glm-4-9b-chat-hf, glm-edge."""

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
