"""Phi-1, Phi-1.5, Phi-2: both halves of a block read one norm, half of each head turns, a biased head.

Gunasekar et al. 2023, arXiv:2306.11644; Li et al. 2023, arXiv:2309.05463.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, both of one norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

NAMES = Names(
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.final_layernorm",
    head="lm_head",
    input_norm="input_layernorm",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="dense",
    up="mlp.fc1",
    down="mlp.fc2",
)
HEAD_NORM_RULES = (
    WeightRule("model.layers.{}.self_attn.q_layernorm", "layers.{}.attention.query_norm"),
    WeightRule("model.layers.{}.self_attn.k_layernorm", "layers.{}.attention.key_norm"),
)


class PhiBlock(Block):
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


class PhiForCausalLM(GPTDecoder):
    """Phi-1, Phi-1.5 and Phi-2; with ``qk_layernorm``, LayerNorms of each head of query and key."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*NAMES.rules(), *HEAD_NORM_RULES)
    default_partial_rotary: ClassVar[float] = 0.5
    default_activation: ClassVar[str | None] = "gelu_new"
    head_bias: ClassVar[bool] = True

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_config(context)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PhiBlock(
            context.ops,
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        normed = self.settings.flag("qk_layernorm", False)
        return self.attention(
            context,
            name,
            qkv_bias=True,
            out_bias=True,
            query_norm=self.make_head_norm(context, f"{name}.q_layernorm") if normed else None,
            key_norm=self.make_head_norm(context, f"{name}.k_layernorm") if normed else None,
        )

    def make_head_norm(self, context: BuildContext, name: str) -> LayerNorm:
        """The norm that all heads share."""
        return LayerNorm(context, name, self.settings.head_dim(), self.norm_eps())
