"""HyperCLOVA X SEED: Granite's multipliers, and norms behind both halves of a block.

NAVER Cloud 2025; the further norms: Kim et al. 2025, arXiv:2502.02732.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.granite import GraniteForCausalLM
from headrace_models.families.llama import RULES
from headrace_models.layers.blocks import ScaledSandwichBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """HyperCLOVA X SEED Think. ``use_post_norm`` false leaves Granite."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.post_norm1", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_norm2", "layers.{}.mlp_out_norm"),
    )

    def logits_multiplier(self) -> float:
        """Granite divides by it."""
        return self.settings.positive("logits_scaling", 1.0)

    def score_multiplier(self) -> float:
        return self.settings.number("attention_multiplier", self.head_dim() ** -0.5)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if not self.settings.flag("use_post_norm", True):
            return super().make_block(context, index, name)
        return ScaledSandwichBlock(
            context.ops,
            self.settings.number("residual_multiplier", 1.0),
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_norm1"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_norm2"),
        )
