"""EXAONE 4: OLMo 2's blocks, a norm for each head, windows on three of four layers and no
positions on the fourth.

LG AI Research 2025, arXiv:2507.11407.

Block: ``h = x + norm(attention(x)); h + norm(mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import has_window_by_pattern
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.rules.llama import POST_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class Exaone4Block(Block):
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


class Exaone4ForCausalLM(LlamaDecoder):
    """EXAONE 4.0 32B, and 1.2B, which has no windows and positions everywhere."""

    weight_rules: ClassVar[Sequence[WeightRule]] = POST_NORM_RULES
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Exaone4Block(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def is_sliding(self, index: int) -> bool:
        return has_window_by_pattern(self.settings, index)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window, sliding = self.settings.optional_integer("sliding_window"), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding or window is None else None,
            sliding_window=window if sliding else None,
            head_norm_eps=self.norm_eps(),
        )
