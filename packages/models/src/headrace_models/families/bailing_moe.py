"""Ling and Ring: fused projections, mixtures of experts routed by a softmax (1) or as DeepSeek V3's (2).

Ling Team 2025, arXiv:2503.05139.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.glm4_moe import CORRECTED
from headrace_models.families.llama import RULES
from headrace_models.families.moe_rules import expert_rules, router_rules, shared_rules
from headrace_models.families.moe_shape import MoEDecoder, deepseek_routing, softmax_routing
from headrace_models.families.mtp import further_layers
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.router import Routing
from headrace_models.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_LAYER = "model.layers.{}"
_RULES = (
    *(r for r in RULES if not r.target.endswith((".qkv", "attention.out", "embed"))),
    WeightRule("model.word_embeddings", "embed"),
    WeightRule(f"{_LAYER}.attention.query_key_value", "layers.{}.attention.qkv", split=ALL_PARTS),
    WeightRule(f"{_LAYER}.attention.dense", "layers.{}.attention.out"),
    *router_rules(correction=f"{_LAYER}.mlp.gate.expert_bias"),
    *expert_rules(),
    *shared_rules(),
)


class BailingMoeForCausalLM(MoEDecoder):
    """Ling-lite, Ling-plus, Ring-lite."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _RULES
    embedding_name: ClassVar[str] = "model.word_embeddings"
    default_theta: ClassVar[float] = 600_000.0

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("norm_head", False)
        super().prepare(context, prefix)

    def routing(self, index: int) -> Routing:
        return softmax_routing(self.settings, renormalise=True)

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("num_shared_experts", 0, minimum=0)
        size = self.settings.integer("moe_shared_expert_intermediate_size", self.expert_size(index))
        return size * count

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.fused_attention(context, name)

    def fused_attention(
        self, context: BuildContext, name: str, **differences: Any
    ) -> SelfAttention:
        """Under the checkpoint's names."""
        return self.attention(
            context,
            name.removesuffix("self_attn") + "attention",
            qkv_bias=self.settings.flag("use_qkv_bias", False),
            out_bias=self.settings.flag("use_bias", False),
            qkv_name="query_key_value",
            out_name="dense",
            part_names=(),
            **differences,
        )


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    """Ling-mini-2.0, Ling-flash-2.0, Ling-1T."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_RULES,
        WeightRule(f"{_LAYER}.attention.query_layernorm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_LAYER}.attention.key_layernorm", "layers.{}.attention.key_norm"),
    )
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED
    default_partial_rotary: ClassVar[float] = 0.5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def routing(self, index: int) -> Routing:
        self.settings.refuse("score_function", "sigmoid")
        return deepseek_routing(self.settings, experts="num_experts")

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if not self.settings.flag("use_qk_norm", True):
            return self.fused_attention(context, name)
        size, eps = self.head_dim(), self.norm_eps()
        own = name.removesuffix("self_attn") + "attention"
        return self.fused_attention(
            context,
            name,
            query_norm=RMSNorm(context, f"{own}.query_layernorm", size, eps),
            key_norm=RMSNorm(context, f"{own}.key_layernorm", size, eps),
        )
