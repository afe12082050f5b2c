"""GPT-NeoX-Japanese: no biases but that of the last layer's attention; halves one after the other.

ABEJA 2022, gpt-neox-japanese-2.7b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.mlp import MLP, MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="gpt_neox_japanese.embed_in",
    blocks="gpt_neox_japanese.layers",
    final_norm="gpt_neox_japanese.final_layer_norm",
    head="embed_out",
    input_norm="input_layernorm",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
KEYS = {"partial_rotary_factor": ("rotary_pct",), "rope_theta": ("rotary_emb_base",)}


class GPTNeoXJapaneseForCausalLM(GPTDecoder):
    """The config states the MLP's size as a multiple of the stream's. Blocks are
    :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(groups=EACH_KV_HEAD),
        WeightRule(f"{NAMES.blocks}.{{}}.attention.dense_bias", "layers.{}.attention.out.bias"),
    )
    spelling: ClassVar[Spelling] = KEYS
    default_activation: ClassVar[str | None] = "gelu"
    ties_embeddings: ClassVar[bool] = True

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_config(context)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, out_bias=index == self.num_layers() - 1)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        hidden = self.hidden_size()
        return MLP(
            context,
            f"{name}.{self.names.up}",
            f"{name}.{self.names.down}",
            hidden,
            int(hidden * self.settings.positive("intermediate_multiple_size", 4)),
            self.activation(),
            bias=False,
        )
