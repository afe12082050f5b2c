"""OLMo 3: OLMo 2 with windows on three of four layers, whose positions are never scaled.

Team OLMo 2025, arXiv:2512.13961.

Block: ``h = x + norm(attention(x)); h + norm(mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import of_windows, rope_settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder, whole_norms
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import POST_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

FULL_EVERY = 4
"""Without ``layer_types``, the last of every four layers has no window."""


class Olmo3Block(Block):
    """``h = x + norm(attention(x)); h + norm(mlp(h))``: both norms stand behind what they norm."""

    def __init__(
        self,
        ops: OpTable,
        attention: SelfAttention,
        attention_out_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.ops = ops
        self.attention = attention
        self.attention_out_norm = attention_out_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else self.ops.add(x, residual)
        x = self.attention_out_norm(self.attention(stream, batch))
        stream = self.ops.add(x, stream)
        return self.mlp_out_norm(self.mlp(stream)), stream


class Olmo3ForCausalLM(LlamaDecoder):
    """OLMo 3 7B and 32B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = POST_NORM_RULES
    default_eps: ClassVar[float] = 1e-5
    default_theta: ClassVar[float] = 500_000.0

    def prepare(self, context: BuildContext, prefix: str) -> None:
        size, config = self.head_dim(), context.config
        limit = self.settings.integer("max_position_embeddings", 2048)
        rope = rope_settings(config, "full_attention", theta=self.default_theta)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)
        theta = self.settings.positive("rope_theta", self.default_theta)
        local = rope_settings(of_windows(config, theta), "sliding_attention", theta=theta)
        self.local_rotary = rotary_table(context, local, size, max_positions=limit)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Olmo3Block(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is None:
            return (index + 1) % FULL_EVERY != 0
        return kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With norms over all heads of query and of key together."""
        sliding, bias = self.is_sliding(index), self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            rotary=self.local_rotary if sliding else self.rotary,
            sliding_window=self.settings.integer("sliding_window", 4096) if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
            **whole_norms(self, context, name),
        )
