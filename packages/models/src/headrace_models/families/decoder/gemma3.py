"""Gemma 3, text: Gemma 2's sandwich, head norms instead of soft caps, five windows to one full layer.

Windowed and full layers rotate by different bases. Gemma Team 2025, arXiv:2503.19786.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gemma import embedding_scale, gemma3_rotary_tables
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.loading.rules.llama import GEMMA_RULES, HEAD_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

DEFAULT_PATTERN = 6
"""Every sixth layer is full."""


class Gemma3Block(Block):
    """Norms before and behind both halves."""

    def __init__(
        self,
        input_norm: NormLayer,
        attention: SelfAttention,
        attention_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention_out_norm(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class Gemma3ForCausalLM(LlamaDecoder):
    """Text model of Gemma 3."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*GEMMA_RULES, *HEAD_NORM_RULES)
    ties_embeddings: ClassVar[bool] = True

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.embed_scale = embedding_scale(context, self.hidden_size())

    def head_dim(self) -> int:
        return self.settings.head_dim(default=256)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        tables = gemma3_rotary_tables(context, self.settings, self.head_dim())
        self.rotary, self.local_rotary = tables

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        """Stored less 1."""
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embed_scale)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Gemma3Block(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        pattern = self.settings.integer("sliding_window_pattern", DEFAULT_PATTERN)
        return (index + 1) % pattern != 0

    def window(self) -> int:
        """In both directions the config's number is the whole width, half of it to either side."""
        window = self.settings.integer("sliding_window", 4096)
        bidirectional = self.settings.flag("use_bidirectional_attention", False)
        return window // 2 if bidirectional else window

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        sliding = self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.local_rotary if sliding else self.rotary,
            scale=self.settings.positive("query_pre_attn_scalar", 256) ** -0.5,
            sliding_window=self.window() if sliding else None,
            soft_cap=self.settings.optional_positive("attn_logit_softcapping") or 0.0,
            qkv_bias=bias,
            out_bias=bias,
            head_norm_eps=self.settings.number("rms_norm_eps", 1e-6),
            head_norm_offset=1.0,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_activation", "hidden_act"),
        )
