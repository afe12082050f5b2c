"""CodeGen 1: GPT-J with query, value and key in one tensor, cut in four for the cores it was trained on.

Nijkamp et al. 2022, arXiv:2203.13474.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, both of one norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import GPT2_KEYS, GPTDecoder, Names
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_norm="ln_1",
    attention="attn",
    qkv=("qkv_proj",),
    out="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
)
CORES = 4
"""Parts that the fused tensor is cut in."""


class CodeGenBlock(Block):
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


class CodeGenForCausalLM(GPTDecoder):
    """CodeGen 350M to 16B, nl, multi and mono."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules(groups=CORES, order=(0, 2, 1))
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"transformer\.h\.\d+\.attn\.(masked_bias|bias|causal_mask)": "the causal mask"
    }
    spelling: ClassVar[Spelling] = GPT2_KEYS
    head_bias: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu_new"

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_dimensions(context)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return CodeGenBlock(
            context.ops,
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, interleaved=True)
