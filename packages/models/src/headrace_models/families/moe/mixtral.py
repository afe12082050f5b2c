"""Mixtral: Mistral with eight experts per layer, two of them active. Jiang et al. 2024,
arXiv:2401.04088."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_MLP = "model.layers.{}.block_sparse_moe"


class MixtralForCausalLM(LlamaDecoder):
    """Mixtral 8x7B, 8x22B."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = ((r"\.mlp\.", ".block_sparse_moe."),)
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        *router_rules(f"{_MLP}.gate"),
        *expert_rules(f"{_MLP}.experts", names=EXPERT_NAMES),
        *router_rules(),  # as transformers 5 calls it
        *expert_rules(),
    )
    default_theta: ClassVar[float] = 1_000_000.0
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With Mistral's window, which published configs do not have."""
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return SparseMoE(
            context,
            name.removesuffix("mlp") + "block_sparse_moe",
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(
                num_experts=self.settings.integer("num_local_experts", maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 2),
                renormalise=True,
            ),
            activation=self.settings.activation("hidden_act"),
            expert_names=EXPERT_NAMES,
        )
