"""Qwen3 with mixtures of experts in place of most MLPs. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.qwen3 import Qwen3ForCausalLM
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.settings import MAX_EXPERTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_EXPERTS = "model.layers.{}.mlp.experts.{}"


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-30B-A3B and its like. Windows, if used, are on every layer."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *Qwen3ForCausalLM.weight_rules,
        WeightRule("model.layers.{}.mlp.gate", "layers.{}.mlp.router"),
        WeightRule(f"{_EXPERTS}.gate_proj", "layers.{}.mlp.experts.{}.gate_up", part=0),
        WeightRule(f"{_EXPERTS}.up_proj", "layers.{}.mlp.experts.{}.gate_up", part=1),
        WeightRule(f"{_EXPERTS}.down_proj", "layers.{}.mlp.experts.{}.down"),
    )

    def head_dim(self) -> int:
        return self.settings.head_dim()

    def sliding_window(self, index: int) -> int | None:
        used = self.settings.flag("use_sliding_window", False)
        return self.settings.optional_integer("sliding_window") if used else None

    def is_dense(self, index: int) -> bool:
        """Whether the layer has an ordinary MLP."""
        step = self.settings.integer("decoder_sparse_step", 1)
        return (
            index in (self.context.config.get("mlp_only_layers") or ()) or (index + 1) % step != 0
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            num_experts=self._num_experts(),
            top_k=self.settings.integer("num_experts_per_tok", 8),
            activation=self.settings.activation("hidden_act"),
            renormalise=self.settings.flag("norm_topk_prob", False),
            expert_names=("gate_proj", "up_proj", "down_proj"),
        )

    def _num_experts(self) -> int:
        """transformers 4 writes ``num_experts``, 5 ``num_local_experts``."""
        has_old = self.context.config.get("num_experts") is not None
        name = "num_experts" if has_old else "num_local_experts"
        return self.settings.integer(name, maximum=MAX_EXPERTS)
