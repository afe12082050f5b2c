"""Granite 4: Mamba 2 with some layers of attention without positions, a shared MLP in each layer and, in
most models, a mixture of experts beside it. IBM 2025, Granite 4.0 language models.

Block: ``h = x + s * mixer(norm(x)); h + s * (shared(norm(h)) + experts(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import layer_kinds, mamba2_sizes, step_limits
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import Mixer, ScaledHybridBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.granite import Multipliers
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.hybrid import ATTENTION_RULES, LAYER
from headrace_models.loading.rules.mamba2 import scan_rules
from headrace_models.loading.rules.moe import stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MOE, _SHARED = f"{LAYER}.block_sparse_moe", f"{LAYER}.shared_mlp"
_KINDS = ("linear_attention", "full_attention", "mamba", "attention")


def _shared_rules(target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{_SHARED}.input_linear", f"{target}.gate_up", split=ALL_PARTS),
        WeightRule(f"{_SHARED}.output_linear", f"{target}.down"),
    )


class GraniteMoeHybridForCausalLM(LlamaDecoder):
    """Granite 4.0 micro to small, with and without experts."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        *ATTENTION_RULES,
        *scan_rules(f"{LAYER}.mamba"),
        WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
        *_shared_rules("layers.{}.mlp"),
        *_shared_rules("layers.{}.mlp.shared"),
        WeightRule(f"{_MOE}.router.layer", "layers.{}.mlp.router"),
        WeightRule(f"{_MOE}.router", "layers.{}.mlp.router"),
        *stacked_rules(f"{_MOE}.input_linear.weight", f"{_MOE}.output_linear.weight"),
        *stacked_rules(f"{_MOE}.experts.gate_up_proj", f"{_MOE}.experts.down_proj"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("position_embedding_type", "rope", "nope")
        self.rotary = None
        if context.config.get("position_embedding_type") == "rope":
            super().prepare(context, prefix)
        self.multipliers = Multipliers.from_settings(self.settings)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.multipliers.embedding)

    def logits_multiplier(self) -> float:
        return self.multipliers.logits

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ScaledHybridBlock(
            context.ops,
            self.multipliers.residual,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, name),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, name),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        count = self.num_layers()
        kinds = layer_kinds(
            self.settings, "layer_types", "layers_block_type", known=_KINDS, count=count
        )
        if kinds is not None and kinds[index] in ("full_attention", "attention"):
            return self.make_attention(context, index, f"{name}.self_attn")
        return Mamba2Mixer(
            context,
            f"{name}.mamba",
            mamba2_sizes(self.settings, self.hidden_size()),
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("mamba_proj_bias", False),
            conv_bias=self.settings.flag("mamba_conv_bias", True),
            norm_eps=self.norm_eps(),
            dt_limits=step_limits(self.settings),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        scale = self.multipliers.scores
        return self.attention(context, name, scale=scale, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        hidden, activation = self.hidden_size(), self.settings.activation("hidden_act")
        shared = GatedMLP(
            context,
            f"{name}.shared_mlp",
            hidden,
            self.settings.integer("shared_intermediate_size", 1024),
            activation,
            stored_fused=True,
            fused_name="input_linear",
            down_name="output_linear",
        )
        experts = self.settings.integer("num_local_experts", 8, minimum=0, maximum=MAX_EXPERTS)
        if not experts:
            return shared
        return SparseMoE(
            context,
            f"{name}.block_sparse_moe",
            hidden_size=hidden,
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(
                experts, self.settings.integer("num_experts_per_tok", 2), renormalise=True
            ),
            activation=activation,
            router_name="router.layer",
            shared=shared,
        )
