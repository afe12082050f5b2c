"""GLM-4.7-Flash: latent attention and mixtures of experts as DeepSeek V3 has them; the config names the
kind of each layer's MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import MLA_MOE_RULES, MLADecoder, grouped_routing
from headrace_models.layers.decoders.moe import is_dense_by_list
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Glm4MoeLiteForCausalLM(MLADecoder):
    """GLM-4.7-Flash."""

    weight_rules: ClassVar[Sequence[WeightRule]] = MLA_MOE_RULES
    default_eps: ClassVar[float] = 1e-5

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
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(context, name, grouped_routing(self.settings), corrected=True)

    def is_dense(self, index: int) -> bool:
        """Old configs count the dense layers; where neither is said, there is one."""
        first = self.settings.integer("first_k_dense_replace", 1, minimum=0)
        return is_dense_by_list(self.settings, index, first)
