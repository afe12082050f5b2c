"""JetMoE: mixtures of experts in both halves of a block, the attention's and the MLP's.

Shen et al. 2024, arXiv:2404.07413.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS, Spelling
from headrace_models.families.moe.jetmoe_attention import Bias, MixedAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import router_rules, stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_LAYER, _OWN = "model.layers.{}", "layers.{}"
_HEADS = f"{_LAYER}.self_attention.experts"
_BLOCK_EPS = 1e-6
"""Epsilon of all norms but the last: the config's is that one's."""


class _BiasedMoE(SparseMoE):
    """A mixture with a bias of the sum."""

    def __init__(
        self, context: BuildContext, name: str, *, hidden_size: int, **arguments: Any
    ) -> None:
        super().__init__(
            context, name, hidden_size=hidden_size, router_name="router.layer", **arguments
        )
        self.bias = Bias(context, f"{name}.bias", hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self.bias(super().__call__(x))


class JetMoeForCausalLM(MoEDecoder):
    """JetMoE 8B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if "attn" not in rule.source and ".mlp." not in rule.source),
        WeightRule(f"{_LAYER}.self_attention.kv_proj", f"{_OWN}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_HEADS}.router.layer", f"{_OWN}.attention.router"),
        WeightRule(
            f"{_HEADS}.input_linear.weight", f"{_OWN}.attention.queries.{{}}.weight", stacked=True
        ),
        WeightRule(
            f"{_HEADS}.output_linear.weight", f"{_OWN}.attention.outs.{{}}.weight", stacked=True
        ),
        WeightRule(f"{_HEADS}.bias", f"{_OWN}.attention.bias.weight"),
        *router_rules(f"{_LAYER}.mlp.router.layer"),
        *stacked_rules(f"{_LAYER}.mlp.input_linear.weight", f"{_LAYER}.mlp.output_linear.weight"),
        WeightRule(f"{_LAYER}.mlp.bias", f"{_OWN}.mlp.bias.weight"),
    )
    ties_embeddings: ClassVar[bool] = True
    spelling: ClassVar[Spelling] = {
        "head_dim": ("kv_channels",),
        "hidden_act": ("activation_function",),
    }

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attention"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), _BLOCK_EPS)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return RMSNorm(context, f"{prefix}model.norm", self.hidden_size(), self.norm_eps())

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return MixedAttention(
            context,
            name,
            routing=self.routing(index),
            hidden_size=self.hidden_size(),
            num_kv_heads=self.settings.integer("num_key_value_heads"),
            head_dim=self.head_dim(),
            rotary=self.rotary,
        )

    def is_dense(self, index: int) -> bool:
        return False

    def routing(self, index: int) -> Routing:
        """The same in both halves."""
        return Routing(
            num_experts=self.settings.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 2),
            renormalise=True,
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def mixture_class(self) -> type[SparseMoE]:
        return _BiasedMoE
