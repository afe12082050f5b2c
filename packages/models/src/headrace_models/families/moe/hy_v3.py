"""Hunyuan 3: head norms, mixtures of experts chosen by corrected sigmoids. Tencent 2026."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import CORRECTED, MOE_RULES, MoEDecoder, is_dense_by_list
from headrace_models.layers.moe.router import Routing
from headrace_models.loading.further_layers import further_layers
from headrace_models.loading.rules.llama import HEAD_NORM_RULES
from headrace_models.loading.rules.moe import router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.mlp"


class HYV3ForCausalLM(MoEDecoder):
    """Hunyuan 3."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MOE_RULES,
        *HEAD_NORM_RULES,
        *router_rules(f"{_MLP}.router.gate", f"{_MLP}.expert_bias"),
        *router_rules(correction=f"{_MLP}.e_score_correction_bias"),  # as transformers 5 calls it
        *shared_rules(f"{_MLP}.shared_mlp"),
    )
    mixture: ClassVar[Mapping[str, Any]] = {**CORRECTED, "router_name": "router.gate"}
    shared_name: ClassVar[str] = "shared_mlp"
    default_theta: ClassVar[float] = 11_158_840.0
    default_eps: ClassVar[float] = 1e-5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def is_dense(self, index: int) -> bool:
        return is_dense_by_list(self.settings, index, 1)

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 8),
            scoring="sigmoid",
            renormalise=True,
            scale=self.settings.number("router_scaling_factor", 2.826),
        )

    def shared_size(self, index: int) -> int:
        self.settings.refuse("mlp_bias", False)
        count = self.settings.integer("num_shared_experts", 1, minimum=0)
        return self.expert_size(index) * count

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context, name, qkv_bias=bias, out_bias=bias, head_norm_eps=self.norm_eps()
        )
