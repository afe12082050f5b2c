"""Cohere Command R: parallel halves behind one LayerNorm, neighbours as rotary pairs, scaled logits.

Cohere 2024, Command R and R+; rotary pairs as in arXiv:2104.09864.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, both of one norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.heads_norm import HeadLayerNorm
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, NormLayer
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, PARALLEL_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class CohereBlock(Block):
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


class CohereForCausalLM(LlamaDecoder):
    """Command R and R+ (whose heads have norms), Aya 23."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*PARALLEL_RULES, *HEAD_NORM_RULES)
    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0

    def logits_multiplier(self) -> float:
        return self.settings.number("logit_scale", 0.0625)

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-5)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps(), bias=False)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return CohereBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            interleaved=True,
            qkv_bias=bias,
            out_bias=bias,
            **self._head_norms(context, name),
        )

    def _head_norms(self, context: BuildContext, name: str) -> dict[str, Any]:
        if not self.settings.flag("use_qk_norm", False):
            return {}
        size, eps = self.head_dim(), self.norm_eps()
        heads = self.settings.integer("num_attention_heads"), self.settings.num_kv_heads()
        return {
            "query_norm": HeadLayerNorm(context, f"{name}.q_norm", heads[0], size, eps),
            "key_norm": HeadLayerNorm(context, f"{name}.k_norm", heads[1], size, eps),
        }
