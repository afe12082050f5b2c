"""Cohere Command R7B and A: windows with positions on three of four layers, neither on the fourth.

Cohere 2025, arXiv:2504.00698.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, both of one norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, NormLayer
from headrace_models.loading.rules.llama import PARALLEL_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

DEFAULT_PATTERN = 4


class Cohere2Block(Block):
    """``x + attention(norm(x)) + mlp(norm(x))``: both halves read one norm."""

    def __init__(
        self,
        ops: OpTable,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp: MLPLayer,
    ) -> None:
        self.ops = ops
        self.input_norm = input_norm
        self.attention = attention
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        return self.ops.add(self.attention(x, batch), self.mlp(x)), stream


class Cohere2ForCausalLM(LlamaDecoder):
    """Command R7B, Command A."""

    weight_rules: ClassVar[Sequence[WeightRule]] = PARALLEL_RULES
    ties_embeddings: ClassVar[bool] = True

    def logits_multiplier(self) -> float:
        return self.settings.number("logit_scale", 0.0625)

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-5)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps(), bias=False)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Cohere2Block(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        return (index + 1) % self.settings.integer("sliding_window_pattern", DEFAULT_PATTERN) != 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, sliding = self.settings.flag("attention_bias", False), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding else None,
            interleaved=True,
            sliding_window=self.settings.integer("sliding_window", 4096) if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
        )
