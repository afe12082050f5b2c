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
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.self_attention import self_attention
from headrace_models.rope import rope_settings

if TYPE_CHECKING:
    from torch import Tensor

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
    default_theta: ClassVar[float] = 10_000.0
    """Rotary base of a config that names none."""
    default_partial_rotary: ClassVar[float] = 1.0
    """Share of a head that turns, if the config names none."""
    default_eps: ClassVar[float] = 1e-6

    def prepare(self, context: BuildContext, prefix: str) -> None:
        rope = rope_settings(
            self.settings.config, theta=self.default_theta, partial=self.default_partial_rotary
        )
        limit = self.settings.integer("max_position_embeddings", 2048)
        self.rotary: Tensor | None = rotary_table(
            context, rope, self.head_dim(), max_positions=limit
        )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        """A norm of the stream."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps())

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.norm")

    def norm_eps(self) -> float:
        return self.settings.number("rms_norm_eps", self.default_eps)

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
