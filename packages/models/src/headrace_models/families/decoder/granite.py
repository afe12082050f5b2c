"""Granite 3, PowerLM: Llama with four multipliers, of the embeddings, the scores, what each half of a
block adds, and the logits.

Block: ``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``.

IBM 2024, Granite 3.0 language models; the multipliers are those of Yang et al. 2022, arXiv:2203.03466.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.granite import Multipliers
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class GraniteBlock(Block):
    """``h = x + s * attention(norm(x)); h + s * mlp(norm(h))``."""

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
    ) -> None:
        self.ops = ops
        self.scale = scale
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.ops.scale(self.attention(x, batch), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp(x), self.scale), stream


class GraniteForCausalLM(LlamaDecoder):
    """Granite 3.0 to 3.3, dense."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.multipliers = Multipliers.from_settings(self.settings)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.multipliers.embedding)

    def logits_multiplier(self) -> float:
        return self.multipliers.logits

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return GraniteBlock(
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
