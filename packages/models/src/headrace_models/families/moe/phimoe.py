"""Phi-3.5-MoE: Mixtral with LayerNorms and biases, routed by sparsemixer, and LongRoPE.

Abdin et al. 2024, arXiv:2404.14219; routing: Liu et al. 2024, arXiv:2409.12136.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings, scaling_block
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.block_sparse_moe"


class PhimoeForCausalLM(MoEDecoder):
    """Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = ((r"\.mlp\.", ".block_sparse_moe."),)
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        *router_rules(f"{_MLP}.gate"),
        *expert_rules(f"{_MLP}.experts", names=EXPERT_NAMES),
        *router_rules("model.layers.{}.mlp.router"),  # as transformers 5 calls it
        *expert_rules(),
    )
    default_theta: ClassVar[float] = 1e6
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """LongRoPE's factor of cosines and sines is stated, one for each of the two contexts."""
        config = self.settings.config
        block = dict(scaling_block(config))
        limit = self.settings.integer("max_position_embeddings", 131072)
        rope = rope_settings(config, theta=self.default_theta)
        if rope.kind == "longrope":
            is_long = context.max_model_len > rope.original_max_position_embeddings
            block["attention_factor"] = rope.number("long_mscale" if is_long else "short_mscale")
            rope = replace(rope, scaling=block)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps())

    def has_head_bias(self) -> bool:
        return self.settings.flag("lm_head_bias", False)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window, qkv_bias=bias, out_bias=bias)

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("num_local_experts", 16, maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 2, maximum=2),
            scoring="sparsemixer",
            jitter=self.settings.number("router_jitter_noise", 0.01),
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        return self.make_mixture(context, index, name, expert_names=EXPERT_NAMES)
