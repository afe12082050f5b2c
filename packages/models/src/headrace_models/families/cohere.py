"""Cohere Command R: parallel halves behind one LayerNorm, neighbours as rotary pairs, scaled logits.

Cohere 2024, Command R and R+; rotary pairs as in arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.heads_norm import HeadLayerNorm
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

PARALLEL_RULES = tuple(rule for rule in RULES if not rule.target.endswith("mlp_norm"))
"""Llama's, for blocks with one norm."""


class CohereForCausalLM(LlamaForCausalLM):
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
        return ParallelBlock(
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
