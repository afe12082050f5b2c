"""StableLM: LayerNorm, a quarter of each head turns, LayerNorms of heads, parallel halves if asked.

Bellagente et al. 2024, arXiv:2402.17834.

Block: Llama's, or ``x + attention(norm(x)) + mlp(norm(x))`` if the config says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.heads_norm import HeadLayerNorms
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_ATTENTION = "model.layers.{}.self_attn"


class StableLmForCausalLM(LlamaDecoder):
    """StableLM 3B, 2 1.6B, 2 12B, Zephyr, Code; the first ones name some settings otherwise."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule(
            f"{_ATTENTION}.q_layernorm.norms.{{}}", "layers.{}.attention.query_norm.norms.{}"
        ),
        WeightRule(f"{_ATTENTION}.k_layernorm.norms.{{}}", "layers.{}.attention.key_norm.norms.{}"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        share = self.settings.positive("rope_pct", 0.25)
        rope = rope_settings(context.config, partial=share)
        limit = self.settings.integer("max_position_embeddings", 4096)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_eps", self.settings.number("norm_eps", 1e-5))

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps())

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if not self.settings.flag("use_parallel_residual", False):
            return super().make_block(context, index, name)
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("use_qkv_bias", False)
        return self.attention(context, name, qkv_bias=bias, **self._head_norms(context, name))

    def _head_norms(self, context: BuildContext, name: str) -> dict[str, Any]:
        if not self.settings.flag("qk_layernorm", False):
            return {}
        size, eps = self.head_dim(), self.norm_eps()
        heads, kv_heads = self.settings.integer("num_attention_heads"), self.settings.num_kv_heads()
        return {
            "query_norm": HeadLayerNorms(context, f"{name}.q_layernorm.norms", heads, size, eps),
            "key_norm": HeadLayerNorms(context, f"{name}.k_layernorm.norms", kv_heads, size, eps),
        }
