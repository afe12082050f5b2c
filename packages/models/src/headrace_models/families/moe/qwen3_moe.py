"""Qwen3 with mixtures of experts in place of most MLPs. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.moe import is_dense_by_step, num_experts
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen3MoeForCausalLM(LlamaDecoder):
    """Qwen3-30B-A3B and its like. Windows, if used, are on every layer."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        *HEAD_NORM_RULES,
        *router_rules(),
        *expert_rules(),
    )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With a norm for each head."""
        bias, windows = (
            self.settings.flag("attention_bias", False),
            self.settings.flag("use_sliding_window", False),
        )
        return self.attention(
            context,
            name,
            sliding_window=self.settings.optional_integer("sliding_window") if windows else None,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.norm_eps(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_step(self.settings, index):
            return super().make_mlp(context, index, name)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            routing=Routing(
                num_experts=num_experts(self.settings),
                top_k=self.settings.integer("num_experts_per_tok", 8),
                renormalise=self.settings.flag("norm_topk_prob", False),
            ),
            activation=self.settings.activation("hidden_act"),
        )
