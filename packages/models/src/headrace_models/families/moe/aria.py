"""The text model of Aria: Llama with many experts, and some that all tokens go to.

Li et al. 2024, arXiv:2410.05993.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import shared_rules, stacked_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.moe.sparse_moe import SparseMoE

_EXPERTS = "model.layers.{}.mlp.experts"


class AriaTextForCausalLM(MoEDecoder):
    """Aria 25B; all experts of a layer are in two tensors, as published and as transformers 5 has them."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.mlp.router", "layers.{}.mlp.router"),
        *stacked_rules(f"{_EXPERTS}.fc1.weight", f"{_EXPERTS}.fc2.weight", transposed=True),
        *stacked_rules(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj", transposed=True),
        *shared_rules(),
    )
    mixture: ClassVar[Mapping[str, Any]] = {"router_name": "router"}

    def is_dense(self, index: int) -> bool:
        return False

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("moe_num_experts", 8, maximum=MAX_EXPERTS),
            top_k=self.settings.integer("moe_topk", 2),
            renormalise=True,
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def shared_size(self, index: int) -> int:
        return self.expert_size(index) * self.settings.integer("moe_num_shared_experts", 2)

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        self.settings.refuse("mlp_bias", False)
        self.settings.refuse("hidden_act", "silu")
        return super().make_mixture(context, index, name, **differences)
