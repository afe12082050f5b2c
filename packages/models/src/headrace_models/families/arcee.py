"""Arcee (AFM): Llama with a squared ReLU in place of the gated MLP.

Arcee AI 2025, AFM-4.5B; the activation: So et al. 2021, arXiv:2109.08668.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.layers.mlp import MLP, MLPLayer

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

UNGATED_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(".gate_up")),
    WeightRule("model.layers.{}.mlp.up_proj", "layers.{}.mlp.up"),
)
"""Llama's, for MLPs without a gate."""


class ArceeForCausalLM(LlamaForCausalLM):
    """AFM."""

    weight_rules: ClassVar[Sequence[WeightRule]] = UNGATED_RULES
    default_eps: ClassVar[float] = 1e-5

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return MLP(
            context,
            f"{name}.up_proj",
            f"{name}.down_proj",
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=self.settings.flag("mlp_bias", False),
        )
