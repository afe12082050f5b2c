"""Nemotron-4, Minitron: LayerNorm with weights stored less 1, squared ReLU, half of each head turns.

Parmar et al. 2024, arXiv:2402.16819.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.rules.llama import NON_GATED_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class NemotronForCausalLM(LlamaDecoder):
    """Nemotron-4, Minitron. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    weight_rules: ClassVar[Sequence[WeightRule]] = NON_GATED_RULES
    default_partial_rotary: ClassVar[float] = 0.5

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        eps = self.settings.number("norm_eps", 1e-5)
        return LayerNorm(context, name, self.hidden_size(), eps, offset=1.0)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return MLP(
            context,
            f"{name}.up_proj",
            f"{name}.down_proj",
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=self.settings.flag("mlp_bias", False),
        )
