"""Arcee (AFM): Llama with a squared ReLU in place of the gated MLP.

Arcee AI 2025, AFM-4.5B; the activation: So et al. 2021, arXiv:2109.08668.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.loading.rules.llama import NON_GATED_RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class ArceeForCausalLM(LlamaDecoder):
    """AFM. Its blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    weight_rules: ClassVar[Sequence[WeightRule]] = NON_GATED_RULES
    default_eps: ClassVar[float] = 1e-5

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
