"""StarCoder2: rotary, grouped heads and windows, with LayerNorm and a non-gated MLP.

Lozhkov et al. 2024, arXiv:2402.19173.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPTDecoder, Names
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.norm",
    head="lm_head",
    input_norm="input_layernorm",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    mlp_norm="post_attention_layernorm",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


class Starcoder2ForCausalLM(GPTDecoder):
    """StarCoder2 3B, 7B and 15B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    spelling: ClassVar[Spelling] = {"layer_norm_eps": ("norm_epsilon",)}
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu_pytorch_tanh"

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_config(context)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("use_bias", True)
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, bias=self.settings.flag("use_bias", True))
