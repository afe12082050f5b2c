"""VaultGemma: Gemma 2 without the norms behind both halves. Sinha et al. 2025, arXiv:2510.15001."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gemma2 import Gemma2ForCausalLM
from headrace_models.families.llama import RULES
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """VaultGemma 1B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if not rule.target.endswith("mlp_norm")),
        WeightRule("model.layers.{}.pre_feedforward_layernorm", "layers.{}.mlp_norm"),
    )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )
