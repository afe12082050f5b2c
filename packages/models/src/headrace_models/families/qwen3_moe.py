"""Qwen3 with mixtures of experts in place of most MLPs. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.moe_rules import expert_rules, router_rules
from headrace_models.families.qwen3 import Qwen3ForCausalLM
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.router import Routing
from headrace_models.settings import MAX_EXPERTS, Settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-30B-A3B and its like. Windows, if used, are on every layer."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *Qwen3ForCausalLM.weight_rules,
        *router_rules(),
        *expert_rules(),
    )
    renormalises: ClassVar[bool] = False
    """Whether the chosen experts' weights are divided by their sum, if the config does not say."""

    def head_dim(self) -> int:
        return self.settings.head_dim()

    def sliding_window(self, index: int) -> int | None:
        used = self.settings.flag("use_sliding_window", False)
        return self.settings.optional_integer("sliding_window") if used else None

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense(self.settings, index):
            return super().make_mlp(context, index, name)
        return self.sparse_mlp(context, name)

    def sparse_mlp(self, context: BuildContext, name: str) -> MLPLayer:
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            routing=Routing(
                num_experts=num_experts(self.settings),
                top_k=self.settings.integer("num_experts_per_tok", 8),
                renormalise=self.settings.flag("norm_topk_prob", self.renormalises),
            ),
            activation=self.settings.activation("hidden_act"),
        )


def is_dense(settings: Settings, index: int) -> bool:
    """Whether the layer has an ordinary MLP, as Qwen's configs state it."""
    step = settings.integer("decoder_sparse_step", 1)
    return index in settings.integers("mlp_only_layers") or (index + 1) % step != 0


def num_experts(settings: Settings) -> int:
    """transformers 4 writes ``num_experts``, 5 ``num_local_experts``."""
    has_old = settings.config.get("num_experts") is not None
    return settings.integer("num_experts" if has_old else "num_local_experts", maximum=MAX_EXPERTS)
