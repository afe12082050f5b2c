"""BLOOM: ALiBi, a norm behind the embeddings, fused projections stored head by head.

BigScience 2022, arXiv:2211.05100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import GPTDecoder, Names, without_prefix

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
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
RULES = (
    *NAMES.rules(groups=EACH_KV_HEAD),
    WeightRule("transformer.word_embeddings_layernorm", "embedding_norm"),
)


class BloomForCausalLM(GPTDecoder):
    """BLOOM and BLOOMZ. Their files lack the prefix ``transformer.``, those of transformers have it."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *without_prefix(RULES))
    spelling: ClassVar[Spelling] = {
        "hidden_size": ("n_embed",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "layer_norm_eps": ("layer_norm_epsilon",),
    }
    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("apply_residual_connection_post_layernorm", False)
        super().prepare(context, prefix)
        name = f"{prefix}transformer.word_embeddings_layernorm"
        self.embedding_norm = self.make_norm(context, name)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        return self.embedding_norm(self.input_vectors(batch))

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        slopes = alibi_slopes(self.settings.integer("num_attention_heads"))
        return self.attention(context, name, alibi_slopes=slopes, qkv_bias=True, out_bias=True)

    def activation(self) -> str:
        return "gelu_tanh"
