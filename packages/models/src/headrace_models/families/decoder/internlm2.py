"""InternLM 2 and 2.5: Llama with query, key and value in one tensor, group by group.

Cai et al. 2024, arXiv:2403.17297.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="model.tok_embeddings",
    head="output",
    input_norm="attention_norm",
    attention="attention",
    qkv=("wqkv",),
    out="wo",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    gate_up=("w1", "w3"),
    down="w2",
)


class InternLM2ForCausalLM(RenamedLlama):
    """1.8B to 20B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules(groups=EACH_KV_HEAD)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)
