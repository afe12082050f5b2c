"""Granite 3 MoE: Granite with mixtures of experts, and in some an MLP that all tokens go to.

IBM 2024, Granite 3.0 language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.granite import GraniteForCausalLM
from headrace_models.families.granite_swa import GraniteSWAForCausalLM
from headrace_models.families.llama import RULES
from headrace_models.families.moe_rules import router_rules, stacked_rules
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.router import Routing
from headrace_models.mapping import ALL_PARTS
from headrace_models.settings import MAX_EXPERTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.block_sparse_moe"
_SHARED = "model.layers.{}.shared_mlp"
_UNMIXED = tuple(rule for rule in RULES if ".mlp." not in rule.target)
_PUBLISHED = (
    *router_rules(f"{_MLP}.router.layer"),
    *stacked_rules(f"{_MLP}.input_linear.weight", f"{_MLP}.output_linear.weight"),
)
_RENAMED = (
    *router_rules(f"{_MLP}.router"),
    *stacked_rules(f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj"),
)
"""As transformers 5 names them, and later checkpoints do."""
_SHARED_RULES = (
    WeightRule(f"{_SHARED}.input_linear", "layers.{}.mlp.shared.gate_up", split=ALL_PARTS),
    WeightRule(f"{_SHARED}.output_linear", "layers.{}.mlp.shared.down"),
)


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3.0 and 3.1 1B-A400M and 3B-A800M, PowerMoE."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_UNMIXED, *_PUBLISHED, *_RENAMED)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        layer = name.removesuffix("mlp")
        return SparseMoE(
            context,
            f"{layer}block_sparse_moe",
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(
                num_experts=self.settings.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 2),
                renormalise=True,
            ),
            activation=self.settings.activation("hidden_act"),
            router_name="router.layer",
            shared=self.make_shared(context, f"{layer}shared_mlp"),
        )

    def make_shared(self, context: BuildContext, name: str) -> MLPLayer | None:
        size = self.settings.integer("shared_intermediate_size", 0, minimum=0)
        if not size:
            return None
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            size,
            self.settings.activation("hidden_act"),
            stored_fused=True,
            fused_name="input_linear",
            down_name="output_linear",
        )


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """With an MLP that all tokens go to."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *GraniteMoeForCausalLM.weight_rules,
        *_SHARED_RULES,
    )


class GraniteMoeSWAForCausalLM(GraniteMoeForCausalLM, GraniteSWAForCausalLM):
    """With windows and sinks, too."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_UNMIXED,
        *_RENAMED,
        *_SHARED_RULES,
        WeightRule("model.layers.{}.self_attn.sinks", "layers.{}.attention.sinks.weight"),
    )
    ties_embeddings: ClassVar[bool] = False
    default_eps: ClassVar[float] = 1e-6
