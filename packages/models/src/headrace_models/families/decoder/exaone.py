"""EXAONE 3 and 3.5: Llama under GPT's names.

LG AI Research 2024, arXiv:2408.03541.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    attention="attn.attention",
    out="out_proj",
    mlp_norm="ln_2",
    gate_up=("c_fc_0", "c_fc_1"),
    down="c_proj",
)


class ExaoneForCausalLM(RenamedLlama):
    """EXAONE 3.0 and 3.5, EXAONE Deep."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ties_embeddings: ClassVar[bool] = True
    spelling: ClassVar[Spelling] = {
        "num_hidden_layers": ("num_layers",),
        "hidden_act": ("activation_function",),
        "rms_norm_eps": ("layer_norm_epsilon",),
    }
