"""Mellum 2: Qwen3 MoE with windows and a rotary base of their own on some layers. JetBrains 2026."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import of_windows, rope_settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.moe import is_dense_by_list, num_experts
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_THETA, _LOCAL_THETA = 500_000.0, 10_000.0


class MellumForCausalLM(LlamaDecoder):
    """Mellum 2. Its layer that guesses a token ahead is not run."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        *HEAD_NORM_RULES,
        *router_rules(),
        *expert_rules(),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {r"mtp\..*": "guesses a token ahead"}

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, config = self.head_dim(), context.config
        limit = self.settings.integer("max_position_embeddings", 131_072)
        rope = rope_settings(config, "full_attention", theta=_THETA)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)
        local = of_windows(config, _LOCAL_THETA)
        local_rope = rope_settings(local, "sliding_attention", theta=_LOCAL_THETA)
        self.local_rotary = rotary_table(context, local_rope, size, max_positions=limit)

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def sliding_window(self, index: int) -> int | None:
        kinds = self.settings.layer_types()
        if kinds is None or kinds[index] != "sliding_attention":
            return None
        return self.settings.integer("sliding_window", 1024)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, window = self.settings.flag("attention_bias", False), self.sliding_window(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if window is None else self.local_rotary,
            sliding_window=window,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.norm_eps(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_list(self.settings, index, 0):
            return super().make_mlp(context, index, name)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            routing=Routing(
                num_experts=num_experts(self.settings),
                top_k=self.settings.integer("num_experts_per_tok", 8),
                renormalise=self.settings.flag("norm_topk_prob", True),
            ),
            activation=self.settings.activation("hidden_act"),
        )
