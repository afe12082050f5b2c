"""ERNIE 4.5 with mixtures of experts, chosen by corrected probabilities.

Baidu 2025, ERNIE 4.5 technical report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.ernie_moe import (
    ERNIE_MOE_RULES,
    IGNORED_WEIGHTS,
    corrected_router,
    ernie_routing,
    is_dense_by_interval,
    num_shared_experts,
)
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Ernie4_5_MoeForCausalLM(MoEDecoder):
    """ERNIE-4.5-21B-A3B, 300B-A47B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = ERNIE_MOE_RULES
    ignored_weights: ClassVar[Mapping[str, str]] = IGNORED_WEIGHTS
    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("use_bias", False)
        super().prepare(context, prefix)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, interleaved=True)

    def is_dense(self, index: int) -> bool:
        return is_dense_by_interval(self.settings, index)

    def routing(self, index: int) -> Routing:
        return ernie_routing(self.settings)

    def shared_size(self, index: int) -> int:
        return self.expert_size(index) * num_shared_experts(self.settings)

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        corrected = corrected_router(self.settings)
        return super().make_mixture(context, index, name, **corrected, **differences)
