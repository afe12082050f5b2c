"""Llama as a decoder that families inherit: pre-norm blocks, rotation, gated MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.heads_norm import WholeRMSNorm
from headrace_models.layers.attention.selection import self_attention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class LlamaDecoder(Decoder):
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
            context,
            rope,
            self.head_dim(),
            max_positions=limit,
            length=self.num_places(context),
        )

    def num_places(self, context: BuildContext) -> int:
        """Places at which a token may stand."""
        return context.max_model_len

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


def whole_norms(decoder: LlamaDecoder, context: BuildContext, name: str) -> dict[str, Any]:
    """Norms over all heads of query, and over all of key, of the attention ``name``: arguments of
    :class:`~headrace_models.layers.attention.self_attention.Attention`."""
    settings, size, eps = decoder.settings, decoder.head_dim(), decoder.norm_eps()
    heads, kv_heads = settings.integer("num_attention_heads"), settings.num_kv_heads()
    return {
        "query_norm": WholeRMSNorm(context, f"{name}.q_norm", heads, size, eps),
        "key_norm": WholeRMSNorm(context, f"{name}.k_norm", kv_heads, size, eps),
    }
