"""Phi-1, Phi-1.5, Phi-2: both halves of a block read one norm, half of each head turns, a biased head.

Gunasekar et al. 2023, arXiv:2306.11644; Li et al. 2023, arXiv:2309.05463.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gpt_shape import GPTDecoder, Names
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

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


class HeadNormedDecoder(GPTDecoder):
    """Partly rotary; with ``qk_layernorm``, LayerNorms of each head of query and key."""

    default_partial_rotary: ClassVar[float] = 0.5

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_config(context)

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
        """Of each head alike."""
        return LayerNorm(context, name, self.settings.head_dim(), self.norm_eps())


class PhiForCausalLM(HeadNormedDecoder):
    """Phi-1, Phi-1.5 and Phi-2."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*NAMES.rules(), *HEAD_NORM_RULES)
    default_activation: ClassVar[str | None] = "gelu_new"
    head_bias: ClassVar[bool] = True

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
        )
