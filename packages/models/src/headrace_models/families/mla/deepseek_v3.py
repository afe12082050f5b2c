"""DeepSeek V3 and R1, Kimi K2, Moonlight: latent attention, experts chosen by corrected sigmoids.

DeepSeek-AI 2024, arXiv:2412.19437. Layers for predicting several tokens, which checkpoints carry
behind the last one, are loaded by :mod:`headrace_models.speculators.mtp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    grouped_routing,
    is_dense_by_frequency,
)
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class DeepseekV3ForCausalLM(MLADecoder):
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
        return self.make_mixture(context, name, grouped_routing(self.settings), corrected=True)
