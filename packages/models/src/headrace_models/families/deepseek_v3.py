"""DeepSeek V3 and R1, Kimi K2, Moonlight: latent attention, experts chosen by corrected sigmoids.

DeepSeek-AI 2024, arXiv:2412.19437. Layers for predicting several tokens, which checkpoints carry
behind the last one, are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.families.moe_rules import expert_rules, router_rules, shared_rules
from headrace_models.families.mtp import further_layers
from headrace_models.layers.latent_attention import (
    LatentAttention,
    LatentSizes,
    latent_rules,
    latent_scale,
)
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.router import Routing
from headrace_models.rope import RopeSettings, rope_settings
from headrace_models.settings import MAX_EXPERTS, MAX_HEAD_DIM

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention import SelfAttention

LATENT_RULES = (
    *(rule for rule in RULES if ".self_attn." not in rule.source),
    *latent_rules("model.layers.{}.self_attn", "layers.{}.attention"),
)
"""A Llama whose attention is latent."""


class LatentDecoder(LlamaForCausalLM):
    """Llama with latent attention, as DeepSeek's configs describe it."""

    weight_rules: ClassVar[Sequence[WeightRule]] = LATENT_RULES

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.sizes = self.latent_sizes()
        self.rope = self.rope_settings(context)
        limit = self.settings.integer("max_position_embeddings", 2048)
        size = self.sizes.rope_head_dim
        self.rotary = rotary_table(context, self.rope, size, max_positions=limit)

    def rope_settings(self, context: BuildContext) -> RopeSettings:
        """Of the part of a head that turns."""
        return rope_settings(context.config)

    def latent_sizes(self) -> LatentSizes:
        settings = self.settings
        return LatentSizes(
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
        return self.latent_attention(context, name)

    def latent_attention(
        self,
        context: BuildContext,
        name: str,
        kind: type[LatentAttention] = LatentAttention,
        **differences: Any,
    ) -> SelfAttention:
        """A layer of the config's sizes; ``differences`` are further arguments of its class."""
        bias = self.settings.flag("attention_bias", False)
        head_dim = self.sizes.nope_head_dim + self.sizes.rope_head_dim
        arguments = {
            "rotary": self.rotary,
            "interleaved": self.settings.flag("rope_interleave", True),
            "scale": latent_scale(self.rope, head_dim),
            "bias": bias,
            "out_bias": bias,
            **differences,
        }
        return kind(context, name, self.sizes, **arguments)


class DeepseekV3ForCausalLM(LatentDecoder):
    """The first layers are dense, the others mixtures with a shared expert."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *LATENT_RULES,
        *router_rules(),
        *expert_rules(),
        *shared_rules(),
    )

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def is_dense(self, index: int) -> bool:
        """Whether the layer has an ordinary MLP."""
        first = self.settings.integer("first_k_dense_replace", 0, minimum=0)
        step = self.settings.integer("moe_layer_freq", 1)
        sparse = self.settings.optional_integer("n_routed_experts") is not None
        return not sparse or index < first or index % step != 0

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("moe_intermediate_size"),
            routing=self.routing(),
            activation=self.settings.activation("hidden_act"),
            corrected=self.is_corrected(),
            exact_router=True,
            shared=self.make_shared(context, f"{name}.shared_experts"),
        )

    def routing(self) -> Routing:
        settings = self.settings
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

    def is_corrected(self) -> bool:
        """Whether the choice, and not the weight, has a term for each expert."""
        return True

    def make_shared(self, context: BuildContext, name: str) -> MLPLayer | None:
        """The expert that all tokens go to: several of the config's size in one."""
        count = self.settings.integer("n_shared_experts", 0, minimum=0)
        if count == 0:
            return None
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            count * self.settings.integer("moe_intermediate_size"),
            self.settings.activation("hidden_act"),
        )
