"""Qwen2-MoE: Qwen2 with mixtures of experts, one more expert that all tokens go to, weighed by a sigmoid.

Qwen Team 2024, Qwen1.5-MoE; Yang et al. 2024, arXiv:2407.10671.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import MoEDecoder, is_dense_by_step, softmax_routing
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import GatedExpert
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.mlp"


class Qwen2MoeForCausalLM(MoEDecoder):
    """Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        *router_rules(),
        *expert_rules(),
        *shared_rules(f"{_MLP}.shared_expert", "layers.{}.mlp.shared.experts.0"),
        WeightRule(f"{_MLP}.shared_expert_gate", "layers.{}.mlp.shared.router"),
    )

    def is_dense(self, index: int) -> bool:
        return is_dense_by_step(self.settings, index)

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, top_k=4)

    def make_shared(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedExpert(
            context,
            name.removesuffix("s"),
            f"{name.removesuffix('s')}_gate",
            self.hidden_size(),
            self.settings.integer("shared_expert_intermediate_size"),
            self.settings.activation("hidden_act"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("qkv_bias", True)
        return self.attention(context, name, sliding_window=self.window(index), qkv_bias=bias)

    def window(self, index: int) -> int | None:
        """Every second of the lower layers has one, if windows are used at all."""
        if not self.settings.flag("use_sliding_window", False):
            return None
        window, kinds = (
            self.settings.optional_integer("sliding_window"),
            self.settings.layer_types(),
        )
        if kinds is not None:
            return window if kinds[index] == "sliding_attention" else None
        lower = index < self.settings.integer("max_window_layers", 28, minimum=0)
        return window if lower and (index + 1) % 2 else None
