"""Llama with latent attention (MLA), a decoder that families inherit, and the mixtures of experts that
DeepSeek V2 and its kin have. DeepSeek-AI 2024, arXiv:2405.04434."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import RopeSettings, rope_settings
from headrace_models.config.settings import MAX_EXPERTS, MAX_HEAD_DIM, Settings
from headrace_models.layers.attention.mla import (
    MLAAttention,
    MLASizes,
    mla_rules,
    mla_scale,
)
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention


MLA_RULES = (
    *(rule for rule in RULES if ".self_attn." not in rule.source),
    *mla_rules("model.layers.{}.self_attn", "layers.{}.attention"),
)
"""A Llama whose attention is latent."""
MLA_MOE_RULES = (*MLA_RULES, *router_rules(), *expert_rules(), *shared_rules())
"""With mixtures of experts and an expert that all tokens go to."""


class MLADecoder(LlamaDecoder):
    """Llama with latent attention, as DeepSeek's configs describe it."""

    weight_rules: ClassVar[Sequence[WeightRule]] = MLA_RULES

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.sizes = self.mla_sizes()
        self.rope = self.rope_settings(context)
        limit = self.settings.integer("max_position_embeddings", 2048)
        size = self.sizes.rope_head_dim
        self.rotary = rotary_table(context, self.rope, size, max_positions=limit)

    def rope_settings(self, context: BuildContext) -> RopeSettings:
        """Rotation of the part of a head that turns."""
        return rope_settings(context.config)

    def mla_sizes(self) -> MLASizes:
        settings = self.settings
        return MLASizes(
            hidden_size=self.hidden_size(),
            num_heads=settings.integer("num_attention_heads"),
            q_lora_rank=settings.optional_integer("q_lora_rank"),
            kv_lora_rank=settings.integer("kv_lora_rank", maximum=MAX_HEAD_DIM),
            nope_head_dim=settings.integer("qk_nope_head_dim", maximum=MAX_HEAD_DIM),
            rope_head_dim=settings.integer("qk_rope_head_dim", maximum=MAX_HEAD_DIM),
            v_head_dim=self.value_size(),
        )

    def value_size(self) -> int:
        return self.settings.integer("v_head_dim", maximum=MAX_HEAD_DIM)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.mla_attention(context, name)

    def mla_attention(
        self,
        context: BuildContext,
        name: str,
        kind: type[MLAAttention] = MLAAttention,
        **differences: Any,
    ) -> SelfAttention:
        """A layer of the config's sizes; ``differences`` are further arguments of its class."""
        bias = self.settings.flag("attention_bias", False)
        head_dim = self.sizes.nope_head_dim + self.sizes.rope_head_dim
        arguments = {
            "rotary": self.rotary,
            "interleaved": self.settings.flag("rope_interleave", True),
            "scale": mla_scale(self.rope, head_dim),
            "bias": bias,
            "out_bias": bias,
            **differences,
        }
        return kind(context, name, self.sizes, **arguments)

    def make_mixture(
        self, context: BuildContext, name: str, routing: Routing, *, corrected: bool
    ) -> SparseMoE:
        """A mixture by the keys of DeepSeek's configs, which its kin share.

        Args:
            corrected: the choice of experts, and not their weight, has a learned term for each expert.
        """
        settings, activation = self.settings, self.settings.activation("hidden_act")
        size = settings.integer("moe_intermediate_size")
        shared = settings.integer("n_shared_experts", 0, minimum=0)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=size,
            routing=routing,
            activation=activation,
            corrected=corrected,
            exact_router=True,
            shared=GatedMLP(
                context, f"{name}.shared_experts", self.hidden_size(), shared * size, activation
            )
            if shared
            else None,
        )


def is_dense_by_frequency(settings: Settings, index: int) -> bool:
    """True if the layer has an ordinary MLP: the first ones do, and those off ``moe_layer_freq``."""
    first = settings.integer("first_k_dense_replace", 0, minimum=0)
    step = settings.integer("moe_layer_freq", 1)
    sparse = settings.optional_integer("n_routed_experts") is not None
    return not sparse or index < first or index % step != 0


def grouped_routing(settings: Settings) -> Routing:
    """DeepSeek V3's: sigmoids unless the config says otherwise, groups that count by their best two."""
    return Routing(
        num_experts=settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
        top_k=settings.integer("num_experts_per_tok"),
        scoring=settings.choice("scoring_func", ("sigmoid", "softmax"), "sigmoid"),
        renormalise=settings.flag("norm_topk_prob", True),
        scale=settings.positive("routed_scaling_factor", 1.0),
        num_groups=settings.integer("n_group", 1),
        top_groups=settings.integer("topk_group", 1),
        group_score="top2",
    )
