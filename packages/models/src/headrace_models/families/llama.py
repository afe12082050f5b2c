"""Llama 1 to 3.3 and what has its shape (Yi, SmolLM 1/2, TinyLlama, ...).

Touvron et al. 2023, arXiv:2302.13971; llama3 rotary scaling: Llama 3 technical report 2024,
arXiv:2407.21783.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.self_attention import self_attention
from headrace_models.rope import rope_settings

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

RULES = (
    WeightRule("model.embed_tokens", "embed"),
    WeightRule("model.layers.{}.input_layernorm", "layers.{}.input_norm"),
    WeightRule("model.layers.{}.self_attn.q_proj", "layers.{}.attention.qkv", part=0),
    WeightRule("model.layers.{}.self_attn.k_proj", "layers.{}.attention.qkv", part=1),
    WeightRule("model.layers.{}.self_attn.v_proj", "layers.{}.attention.qkv", part=2),
    WeightRule("model.layers.{}.self_attn.o_proj", "layers.{}.attention.out"),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_norm"),
    WeightRule("model.layers.{}.mlp.gate_proj", "layers.{}.mlp.gate_up", part=0),
    WeightRule("model.layers.{}.mlp.up_proj", "layers.{}.mlp.gate_up", part=1),
    WeightRule("model.layers.{}.mlp.down_proj", "layers.{}.mlp.down"),
    WeightRule("model.norm", "final_norm"),
    WeightRule("lm_head", "head"),
)


class LlamaForCausalLM(Decoder):
    """The reference shape; families that differ in a detail override its method."""

    weight_rules: ClassVar[Sequence[WeightRule]] = RULES

    def prepare(self, context: BuildContext, prefix: str) -> None:
        rope = rope_settings(context.config)
        limit = self.settings.integer("max_position_embeddings", 2048)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        hidden, eps = self.hidden_size(), self.settings.number("rms_norm_eps", 1e-6)
        return PreNormBlock(
            RMSNorm(context, f"{name}.input_layernorm", hidden, eps),
            self.make_attention(context, index, f"{name}.self_attn"),
            RMSNorm(context, f"{name}.post_attention_layernorm", hidden, eps),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        """A layer of the config's sizes; ``differences`` are further arguments of `SelfAttention`."""
        arguments = {
            "hidden_size": self.hidden_size(),
            "num_heads": self.settings.integer("num_attention_heads"),
            "num_kv_heads": self.settings.num_kv_heads(),
            "head_dim": self.head_dim(),
            "rotary": self.rotary,
            **differences,
        }
        return self_attention(context, name, **arguments)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            bias=self.settings.flag("mlp_bias", False),
        )

    def head_dim(self) -> int:
        return self.settings.head_dim()
