"""OLMo 2: norms behind both halves of a block, and over whole queries and keys.

Team OLMo 2024, arXiv:2501.00656.

Block: ``h = x + norm(attention(x)); h + norm(mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder, whole_norms
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.rules.llama import POST_NORM_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class Olmo2Block(Block):
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


class Olmo2ForCausalLM(LlamaDecoder):
    """OLMo 2 1B to 32B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = POST_NORM_RULES
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Olmo2Block(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """With norms over all heads of query and of key together."""
        bias, norms = self.settings.flag("attention_bias", False), whole_norms(self, context, name)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias, **norms)
