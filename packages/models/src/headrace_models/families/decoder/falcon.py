"""Falcon: shared or grouped key-value heads, parallel halves, rotary or ALiBi.

Almazrouei et al. 2023, arXiv:2311.16867.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, of one norm or two; sequential halves if the config says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_norm="input_layernorm",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


class FalconForCausalLM(GPTDecoder):
    """Falcon RW (ALiBi, one half after the other), 7B (one key-value head, one norm), 40B, 180B and
    Falcon 2 (grouped heads, a norm for each half)."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(groups=EACH_KV_HEAD),
        WeightRule("transformer.h.{}.ln_attn", "layers.{}.input_norm"),
        WeightRule("transformer.h.{}.ln_mlp", "layers.{}.mlp_norm"),
    )
    spelling: ClassVar[Spelling] = {
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "num_kv_heads": ("n_head_kv",),
        "intermediate_size": ("ffn_hidden_size",),
        "hidden_act": ("activation",),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu"

    def make_rotary(self, context: BuildContext) -> Tensor | None:
        return None if self.has_alibi() else self.rotary_of_config(context)

    def has_alibi(self) -> bool:
        return self.settings.flag("alibi", False)

    def is_grouped(self) -> bool:
        """40B and later; the first configs of these say it by the number of heads only."""
        stated = "n_head_kv" in self.settings.config
        return self.settings.flag("new_decoder_architecture", stated)

    def num_kv_heads(self) -> int:
        heads = self.settings.integer("num_attention_heads")
        if self.is_grouped():
            return self.settings.integer("num_kv_heads", heads)
        return 1 if self.settings.flag("multi_query", True) else heads

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        grouped = self.is_grouped()
        if not grouped and not self.settings.flag("parallel_attn", True):
            return super().make_block(context, index, name)
        two = grouped and self.settings.integer("num_ln_in_parallel_attn", 2, maximum=2) == 2
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.{'ln_attn' if two else 'input_layernorm'}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
            self.make_norm(context, f"{name}.ln_mlp") if two else None,
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias, slopes = self.settings.flag("bias", False), None
        if self.has_alibi():  # added before the scores are scaled
            heads, scale = self.settings.integer("num_attention_heads"), self.settings.head_dim()
            slopes = alibi_slopes(heads) * scale**-0.5
        return self.attention(context, name, alibi_slopes=slopes, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, bias=self.settings.flag("bias", False))
