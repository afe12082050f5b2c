"""OLMo 2: norms behind both halves of a block, and over whole queries and keys.

Team OLMo 2024, arXiv:2501.00656.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import PostNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.heads_norm import WholeRMSNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

POST_NORM_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(("input_norm", "mlp_norm"))),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.attention_out_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
    *HEAD_NORM_RULES,
)
"""Llama's, for blocks whose only norms stand behind both halves, and norms of queries and keys."""


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2 1B to 32B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = POST_NORM_RULES
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PostNormBlock(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.normed_attention(context, name)

    def normed_attention(
        self, context: BuildContext, name: str, **differences: Any
    ) -> SelfAttention:
        """With norms over all heads of query and of key together."""
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            **whole_norms(self, context, name),
            **differences,
        )


def whole_norms(decoder: LlamaForCausalLM, context: BuildContext, name: str) -> dict[str, Any]:
    """Norms over all heads of query, and over all of key, of the attention ``name``: arguments of
    :class:`~headrace_models.layers.attention.Attention`."""
    settings, size, eps = decoder.settings, decoder.head_dim(), decoder.norm_eps()
    heads, kv_heads = settings.integer("num_attention_heads"), settings.num_kv_heads()
    return {
        "query_norm": WholeRMSNorm(context, f"{name}.q_norm", heads, size, eps),
        "key_norm": WholeRMSNorm(context, f"{name}.k_norm", kv_heads, size, eps),
    }
