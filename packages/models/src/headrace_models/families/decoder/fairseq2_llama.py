"""Llama as fairseq2 writes it: other names, and neighbouring dimensions as rotary pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="decoder_frontend.embed",
    blocks="decoder.layers",
    final_norm="decoder.layer_norm",
    head="final_proj",
    input_norm="self_attn_layer_norm",
    out="output_proj",
    mlp_norm="ffn_layer_norm",
    mlp="ffn",
    gate_up=("gate_proj", "inner_proj"),
    down="output_proj",
)


class Fairseq2LlamaForCausalLM(RenamedLlama):
    """Unsharded checkpoints, and those whose shards another tool has put together."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        return super().attention(context, name, interleaved=True, **differences)
