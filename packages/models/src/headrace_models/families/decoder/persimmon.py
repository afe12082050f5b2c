"""Persimmon: Phi's head norms with a fused projection stored head by head, squared ReLU.

Elsen et al. 2023, "Releasing Persimmon-8B".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
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
    qkv=("query_key_value",),
    out="dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
HEAD_NORM_RULES = (
    WeightRule("model.layers.{}.self_attn.q_layernorm", "layers.{}.attention.query_norm"),
    WeightRule("model.layers.{}.self_attn.k_layernorm", "layers.{}.attention.key_norm"),
)


class PersimmonForCausalLM(GPTDecoder):
    """Persimmon 8B, and the text model of Fuyu; with ``qk_layernorm``, LayerNorms of each head of query
    and key. Blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(groups=EACH_KV_HEAD),
        *HEAD_NORM_RULES,
    )
    default_partial_rotary: ClassVar[float] = 0.5
    default_theta: ClassVar[float] = 25_000.0
    default_activation: ClassVar[str | None] = "relu2"

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
        """The norm that all heads share."""
        return LayerNorm(context, name, self.settings.head_dim(), self.norm_eps())
