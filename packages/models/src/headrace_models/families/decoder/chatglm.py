"""ChatGLM 2 and 3, GLM-4 and CodeGeeX 4 as first published: grouped heads, half of each head turns in
neighbouring pairs, everything fused.

Zeng et al. 2022, arXiv:2210.02414; GLM Team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, NormLayer
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.embedding.word_embeddings",
    blocks="transformer.encoder.layers",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    attention="self_attention",
    qkv=("query_key_value",),
    out="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)


class ChatGLMModel(RenamedLlama):
    """Its biases are ``add_qkv_bias`` and ``add_bias_linear``; half of a head turns, whatever its size.
    ``rope_ratio`` multiplies the rotary base, as in all but ChatGLM2-6B-32K, which divides positions by it
    and whose config does not tell."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"transformer\.rotary_pos_emb\.inv_freq": "computed from the config"
    }
    spelling: ClassVar[Spelling] = {
        "vocab_size": ("padded_vocab_size",),
        "num_hidden_layers": ("num_layers",),
        "head_dim": ("kv_channels",),
        "intermediate_size": ("ffn_hidden_size",),
        "rms_norm_eps": ("layernorm_epsilon",),
        "max_position_embeddings": ("seq_length",),
    }
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("apply_residual_connection_post_layernorm", False)
        self.settings.refuse("post_layer_norm", True)
        self.settings.refuse("position_encoding_2d", False)  # ChatGLM 1
        self.settings.refuse("pre_seq_len")
        stretch = self.settings.positive("rope_ratio", 1.0)
        rope = rope_settings(self.settings.config, theta=10_000.0 * stretch, partial=0.5)
        self.rotary = rotary_table(context, rope, self.head_dim())

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        if self.settings.flag("rmsnorm", True):
            return super().make_norm(context, name)
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps())

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        every = self.settings.flag("add_bias_linear", False)
        qkv = self.settings.flag("add_qkv_bias", False) or every
        heads = self.settings.integer("num_attention_heads")
        grouped = self.settings.flag("multi_query_attention", False)
        return self.attention(
            context,
            name,
            num_kv_heads=self.settings.integer("multi_query_group_num", 1) if grouped else heads,
            interleaved=True,
            qkv_bias=qkv,
            out_bias=every,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, bias=self.settings.flag("add_bias_linear", False))
