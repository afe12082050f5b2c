"""Hunyuan-A13B: Hunyuan with mixtures of experts and an MLP that all tokens go to. Tencent 2025."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.hunyuan_dense import HunYuanDenseV1ForCausalLM
from headrace_models.families.moe_rules import expert_rules, router_rules, shared_rules
from headrace_models.families.moe_shape import MoEDecoder
from headrace_models.layers.router import Routing
from headrace_models.settings import MAX_EXPERTS

_MLP = "model.layers.{}.mlp"


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM, MoEDecoder):
    """Hunyuan-A13B. Keys and values that layers share (``use_cla``) are not served."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *HunYuanDenseV1ForCausalLM.weight_rules,
        *router_rules(f"{_MLP}.gate.wg"),
        *expert_rules(),
        *shared_rules(f"{_MLP}.shared_mlp"),
    )
    mixture: ClassVar[Mapping[str, Any]] = {"router_name": "gate.wg", "exact_router": True}
    shared_name: ClassVar[str] = "shared_mlp"

    def routing(self, index: int) -> Routing:
        self.settings.refuse("use_cla", False)
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self._of_layer("moe_topk", index),
            renormalise=True,
        )

    def _of_layer(self, name: str, index: int) -> int:
        """A number for all layers, or a list with one for each."""
        if not isinstance(self.settings.config.get(name), list):
            return self.settings.integer(name, 1)
        return self.settings.integers(name, self.num_layers())[index]

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def shared_size(self, index: int) -> int:
        return self.expert_size(index)
