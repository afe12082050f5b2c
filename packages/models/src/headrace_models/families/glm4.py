"""GLM-4-0414: GLM-4 with norms behind both halves of a block, too. Z.ai 2025."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.glm import FUSED_MLP_RULES, GlmForCausalLM
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *FUSED_MLP_RULES,
        WeightRule("model.layers.{}.post_self_attn_layernorm", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_mlp_layernorm", "layers.{}.mlp_out_norm"),
    )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_self_attn_layernorm"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )
