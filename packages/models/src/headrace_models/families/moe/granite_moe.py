"""Granite 3 MoE: Granite with mixtures of experts, and in some an MLP that all tokens go to.

Block: ``h = x + s * attention(norm(x)); h + s * experts(norm(h))``.

IBM 2024, Granite 3.0 language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ScaledBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.granite import Multipliers, layer_rotary_tables, layer_window
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import router_rules, stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.block_sparse_moe"
_SHARED = "model.layers.{}.shared_mlp"
_UNMIXED = tuple(rule for rule in RULES if ".mlp." not in rule.target)
_PUBLISHED = (
    *router_rules(f"{_MLP}.router.layer"),
    *stacked_rules(f"{_MLP}.input_linear.weight", f"{_MLP}.output_linear.weight"),
)
_RENAMED = (
    *router_rules(f"{_MLP}.router"),
    *stacked_rules(f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj"),
)
"""As transformers 5 names them, and later checkpoints do."""
_SHARED_RULES = (
    WeightRule(f"{_SHARED}.input_linear", "layers.{}.mlp.shared.gate_up", split=ALL_PARTS),
    WeightRule(f"{_SHARED}.output_linear", "layers.{}.mlp.shared.down"),
)


class GraniteMoeForCausalLM(LlamaDecoder):
    """Granite 3.0 and 3.1 1B-A400M and 3B-A800M, PowerMoE."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_UNMIXED, *_PUBLISHED, *_RENAMED)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.multipliers = Multipliers.from_settings(self.settings)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.multipliers.embedding)

    def logits_multiplier(self) -> float:
        return self.multipliers.logits

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ScaledBlock(
            context.ops,
            self.multipliers.residual,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        scale = self.multipliers.scores
        return self.attention(context, name, scale=scale, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        layer = name.removesuffix("mlp")
        return SparseMoE(
            context,
            f"{layer}block_sparse_moe",
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(
                num_experts=self.settings.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 2),
                renormalise=True,
            ),
            activation=self.settings.activation("hidden_act"),
            router_name="router.layer",
            shared=self.make_shared(context, f"{layer}shared_mlp"),
        )

    def make_shared(self, context: BuildContext, name: str) -> MLPLayer | None:
        size = self.settings.integer("shared_intermediate_size", 0, minimum=0)
        if not size:
            return None
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            size,
            self.settings.activation("hidden_act"),
            stored_fused=True,
            fused_name="input_linear",
            down_name="output_linear",
        )


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """With an MLP that all tokens go to."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *GraniteMoeForCausalLM.weight_rules,
        *_SHARED_RULES,
    )


class GraniteMoeSWAForCausalLM(GraniteMoeForCausalLM):
    """Granite 4.1: with windows, sinks and a rotary base for each layer, too."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_UNMIXED,
        *_RENAMED,
        *_SHARED_RULES,
        WeightRule("model.layers.{}.self_attn.sinks", "layers.{}.attention.sinks.weight"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.multipliers = Multipliers.from_settings(self.settings)
        self.rotary = None  # each layer has its own
        self.tables = layer_rotary_tables(
            context, self.settings, self.num_layers(), self.head_dim()
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            rotary=self.tables[index],
            scale=self.multipliers.scores,
            sliding_window=layer_window(self.settings, index),
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
        )
