"""Ling and Ring: fused projections, mixtures of experts routed by a softmax (1) or as DeepSeek V3's (2).

Ling Team 2025, arXiv:2503.05139.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import (
    CORRECTED,
    MoEDecoder,
    deepseek_routing,
    softmax_routing,
)
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.further_layers import further_layers
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.config.settings import Settings

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


def fused_attention(
    decoder: MoEDecoder, context: BuildContext, name: str, **differences: Any
) -> SelfAttention:
    """A layer of the config's sizes under the checkpoint's names; ``differences`` are further arguments of
    :class:`SelfAttention`."""
    return decoder.attention(
        context,
        name,
        qkv_bias=decoder.settings.flag("use_qkv_bias", False),
        out_bias=decoder.settings.flag("use_bias", False),
        qkv_name="query_key_value",
        out_name="dense",
        part_names=(),
        **differences,
    )


def shared_experts_size(settings: Settings) -> int:
    """Inner size of all experts that every token goes to."""
    each = settings.integer(
        "moe_shared_expert_intermediate_size", settings.integer("moe_intermediate_size")
    )
    return each * settings.integer("num_shared_experts", 0, minimum=0)


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
        return shared_experts_size(self.settings)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return fused_attention(self, context, name.removesuffix("self_attn") + "attention")


class BailingMoeV2ForCausalLM(MoEDecoder):
    """Ling-mini-2.0, Ling-flash-2.0, Ling-1T."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_RULES,
        WeightRule(f"{_LAYER}.attention.query_layernorm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_LAYER}.attention.key_layernorm", "layers.{}.attention.key_norm"),
    )
    embedding_name: ClassVar[str] = "model.word_embeddings"
    mixture: ClassVar[Mapping[str, Any]] = CORRECTED
    default_theta: ClassVar[float] = 600_000.0
    default_partial_rotary: ClassVar[float] = 0.5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("norm_head", False)
        super().prepare(context, prefix)

    def routing(self, index: int) -> Routing:
        self.settings.refuse("score_function", "sigmoid")
        return deepseek_routing(self.settings, experts="num_experts")

    def shared_size(self, index: int) -> int:
        return shared_experts_size(self.settings)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With a norm for each head, unless the config turns that off."""
        name = name.removesuffix("self_attn") + "attention"
        if not self.settings.flag("use_qk_norm", True):
            return fused_attention(self, context, name)
        size, eps = self.head_dim(), self.norm_eps()
        return fused_attention(
            self,
            context,
            name,
            query_norm=RMSNorm(context, f"{name}.query_layernorm", size, eps),
            key_norm=RMSNorm(context, f"{name}.key_layernorm", size, eps),
        )
