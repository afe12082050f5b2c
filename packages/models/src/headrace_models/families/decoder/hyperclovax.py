"""HyperCLOVA X SEED: Granite's multipliers, and norms behind both halves of a block.

NAVER Cloud 2025; the further norms: Kim et al. 2025, arXiv:2502.02732.

Block: ``h = x + s * norm(attention(norm(x))); h + s * norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NoNorm, NormLayer
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class HyperCLOVAXBlock(Block):
    """Norms before and behind both halves; what each half adds is multiplied by a number."""

    def __init__(
        self,
        ops: OpTable,
        scale: float,
        input_norm: NormLayer,
        attention: SelfAttention,
        attention_out_norm: NormLayer | NoNorm,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer | NoNorm,
    ) -> None:
        self.ops = ops
        self.scale = scale
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
        x = self.ops.scale(self.attention_out_norm(self.attention(x, batch)), self.scale)
        x, stream = self.mlp_norm.add(x, stream)
        return self.ops.scale(self.mlp_out_norm(self.mlp(x)), self.scale), stream


class HyperCLOVAXForCausalLM(LlamaDecoder):
    """HyperCLOVA X SEED Think. ``use_post_norm`` false leaves Granite."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.post_norm1", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_norm2", "layers.{}.mlp_out_norm"),
    )

    def token_vectors(self, ids: Tensor) -> Tensor:
        multiplier = self.settings.number("embedding_multiplier", 1.0)
        return self.context.ops.scale(self.embed(ids), multiplier)

    def logits_multiplier(self) -> float:
        """Granite divides by it."""
        return self.settings.positive("logits_scaling", 1.0)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        behind = self.settings.flag("use_post_norm", True)
        return HyperCLOVAXBlock(
            context.ops,
            self.settings.number("residual_multiplier", 1.0),
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_norm1") if behind else NoNorm(),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_norm2") if behind else NoNorm(),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        scale = self.settings.number("attention_multiplier", self.head_dim() ** -0.5)
        return self.attention(context, name, scale=scale, qkv_bias=bias, out_bias=bias)
