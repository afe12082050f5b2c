"""Mistral 4 and Mistral Large 3: latent attention whose queries grow with their position, experts chosen
by a softmax.

Mistral AI 2025, Mistral Large 3; the factor is Llama 4's (Meta 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import RopeSettings, rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    is_dense_by_frequency,
)
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.positions import query_temperature
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention


class Mistral4ForCausalLM(MLADecoder):
    """Text models in the layout of transformers."""

    weight_rules: ClassVar[Sequence[WeightRule]] = MLA_MOE_RULES

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.temperature = query_temperature(context)

    def rope_settings(self, context: BuildContext) -> RopeSettings:
        """The config's share of a head that turns is the part that is all turned here."""
        return replace(rope_settings(context.config), partial_rotary_factor=1.0)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.mla_attention(context, name, query_temperature=self.temperature)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_frequency(self.settings, index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(context, name, self.routing(), corrected=False)

    def routing(self) -> Routing:
        settings = self.settings
        settings.refuse("scoring_func", "softmax")
        return Routing(
            num_experts=settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
            top_k=settings.integer("num_experts_per_tok"),
            renormalise=settings.flag("norm_topk_prob", True),
            scale=settings.positive("routed_scaling_factor", 1.0),
            num_groups=settings.integer("n_group", 1),
            top_groups=settings.integer("topk_group", 1),
            group_score="top2",
        )
