"""Hunyuan-A13B: Hunyuan with mixtures of experts and an MLP that all tokens go to. Tencent 2025."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"


class HunYuanMoEV1ForCausalLM(MoEDecoder):
    """Hunyuan-A13B. Keys and values that layers share (``use_cla``) are not served."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule(f"{_ATTENTION}.query_layernorm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_ATTENTION}.key_layernorm", "layers.{}.attention.key_norm"),
        *router_rules(f"{_MLP}.gate.wg"),
        *expert_rules(),
        *shared_rules(f"{_MLP}.shared_mlp"),
    )
    mixture: ClassVar[Mapping[str, Any]] = {"router_name": "gate.wg", "exact_router": True}
    shared_name: ClassVar[str] = "shared_mlp"
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With a norm for each head, behind the rotation."""
        bias = self.settings.flag("attention_bias", False)
        size, eps = self.head_dim(), self.norm_eps()
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            query_norm=RMSNorm(context, f"{name}.query_layernorm", size, eps),
            key_norm=RMSNorm(context, f"{name}.key_layernorm", size, eps),
            norm_after_rotary=True,
        )

    def routing(self, index: int) -> Routing:
        self.settings.refuse("use_cla", False)
        return Routing(
            num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
            top_k=self._of_layer("moe_topk", index),
            renormalise=True,
        )

    def _of_layer(self, name: str, index: int) -> int:
        """A number for all layers, or a list with one for each."""
        if not isinstance(self.settings.config.get(name), list):
            return self.settings.integer(name, 1)
        return self.settings.integers(name, self.num_layers())[index]

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def shared_size(self, index: int) -> int:
        return self.expert_size(index)
