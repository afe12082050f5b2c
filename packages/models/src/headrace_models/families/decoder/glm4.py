"""GLM-4-0414: GLM-4 with norms behind both halves of a block, too. Z.ai 2025.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.rules.llama import FUSED_MLP_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class Glm4Block(Block):
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


class Glm4ForCausalLM(LlamaDecoder):
    """GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *FUSED_MLP_RULES,
        WeightRule("model.layers.{}.post_self_attn_layernorm", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_mlp_layernorm", "layers.{}.mlp_out_norm"),
    )
    default_partial_rotary: ClassVar[float] = 0.5
    default_eps: ClassVar[float] = 1.5625e-7

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Glm4Block(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_self_attn_layernorm"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", True)
        return self.attention(context, name, interleaved=True, qkv_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            stored_fused=True,
        )
