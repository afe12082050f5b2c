"""MPT: ALiBi with slopes of its own, no bias anywhere.

MosaicML 2023, "Introducing MPT-7B".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings, Spelling
from headrace_models.layers.attention.alibi import alibi_slopes_around
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.blocks",
    final_norm="transformer.norm_f",
    head="lm_head",
    input_norm="norm_1",
    attention="attn",
    qkv=("Wqkv",),
    out="out_proj",
    mlp_norm="norm_2",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


class MptForCausalLM(GPTDecoder):
    """MPT 7B and 30B, which their config.json calls ``MPTForCausalLM``."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    spelling: ClassVar[Spelling] = {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        stated = self.settings.config.get("attn_config") or {}
        if not isinstance(stated, Mapping):
            raise UnsupportedModel(f"config.json: attn_config = {stated!r:.200}: must be an object")
        own = self.attention_settings = Settings(stated)
        own.refuse("attn_type", "multihead_attention")
        own.refuse("alibi", True)
        own.refuse("prefix_lm", False)
        own.refuse("qk_ln", False)
        self.settings.refuse("no_bias", True)
        self.settings.refuse("norm_type", "low_precision_layernorm", "layernorm")
        self.settings.refuse("logit_scale")
        super().prepare(context, prefix)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps(), bias=False)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        own = self.attention_settings
        heads, largest = (
            self.settings.integer("num_attention_heads"),
            own.positive("alibi_bias_max", 8),
        )
        return self.attention(
            context,
            name,
            scale=own.optional_positive("softmax_scale"),
            clip=own.optional_positive("clip_qkv"),
            alibi_slopes=alibi_slopes_around(heads, largest),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        hidden = self.hidden_size()
        return MLP(
            context,
            f"{name}.{self.names.up}",
            f"{name}.{self.names.down}",
            hidden,
            int(hidden * self.settings.positive("expansion_ratio", 4)),
            "gelu",
            bias=False,
        )
