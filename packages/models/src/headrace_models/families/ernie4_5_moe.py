"""ERNIE 4.5 with mixtures of experts, chosen by corrected probabilities.

Baidu 2025, ERNIE 4.5 technical report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.ernie4_5 import Ernie4_5ForCausalLM
from headrace_models.families.moe_rules import router_rules
from headrace_models.families.moe_shape import MOE_RULES, MoEDecoder
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.router import Routing
from headrace_models.settings import MAX_EXPERTS, MAX_LAYERS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_STATICS = "mlp.moe_statics.e_score_correction_bias"


class Ernie4_5_MoeForCausalLM(MoEDecoder, Ernie4_5ForCausalLM):
    """ERNIE-4.5-21B-A3B, 300B-A47B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        *router_rules(correction=f"model.layers.{{}}.{_STATICS}"),
        WeightRule(
            f"model.layers.{{}}.mlp.gate.{_STATICS.removeprefix('mlp.')}",
            "layers.{}.mlp.router.correction",
        ),  # as transformers 5 calls it
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.mtp_.*": "predicts several tokens at once"
    }

    def head_dim(self) -> int:
        return self.settings.head_dim()

    def is_dense(self, index: int) -> bool:
        every = self.settings.integer("moe_layer_interval", 1)
        first = self.settings.integer("moe_layer_start_index", 1, minimum=0)
        last = self.settings.integer("moe_layer_end_index", -1, minimum=-1, maximum=MAX_LAYERS)
        return (index + 1) % every != 0 or index < first or (last != -1 and index > last)

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("moe_num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("moe_k", 6),
            renormalise=True,
        )

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("moe_num_shared_experts", 2, minimum=0)
        return self.expert_size(index) * count

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        self.settings.refuse("use_bias", False)
        return super().make_mixture(
            context,
            index,
            name,
            corrected=True,
            correction_shape=(1, self.settings.integer("moe_num_experts")),
            exact_router=True,
            **differences,
        )
