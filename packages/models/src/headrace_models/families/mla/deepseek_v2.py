"""DeepSeek V2 and V2-Lite: latent attention, experts chosen by a softmax within the best groups; those of
DeepSeek-VL2 (arXiv:2412.10302) perhaps as V3's are.

DeepSeek-AI 2024, arXiv:2405.04434.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    grouped_routing,
    is_dense_by_frequency,
)
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

METHODS = ("greedy", "group_limited_greedy")
_CORRECTED = "noaux_tc"
"""The method of V3 (arXiv:2412.19437)."""


class DeepseekV2ForCausalLM(MLADecoder):
    """The first layers are dense, the others mixtures with a shared expert."""

    weight_rules: ClassVar[Sequence[WeightRule]] = MLA_MOE_RULES

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_frequency(self.settings, index):
            return super().make_mlp(context, index, name)
        corrected = self.settings.config.get("topk_method") == _CORRECTED
        routing = grouped_routing(self.settings) if corrected else self.routing()
        return self.make_mixture(context, name, routing, corrected=corrected)

    def routing(self) -> Routing:
        """The probabilities of the chosen are divided by their sum, or multiplied by the factor: one
        of the two, as the published code does."""
        settings = self.settings
        method = settings.choice("topk_method", METHODS, "greedy")
        grouped = method == "group_limited_greedy"
        renormalise = settings.flag("norm_topk_prob", False)
        return Routing(
            num_experts=settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
            top_k=settings.integer("num_experts_per_tok"),
            scoring=settings.choice("scoring_func", ("softmax",), "softmax"),
            renormalise=renormalise,
            scale=1.0 if renormalise else settings.positive("routed_scaling_factor", 1.0),
            num_groups=settings.integer("n_group") if grouped else 1,
            top_groups=settings.integer("topk_group") if grouped else 1,
        )
