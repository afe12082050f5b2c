"""Qwen 1: Llama under GPT's names, with query, key and value in one biased product.

Bai et al. 2023, arXiv:2309.16609. Within the trained context, which is ``seq_length``: beyond it the
publisher's code changes the rotary base and the scores with the length of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    mlp_norm="ln_2",
    gate_up=("w2", "w1"),
    down="c_proj",
)


class QWenLMHeadModel(RenamedLlama):
    """Qwen 1.8B to 72B, base and chat."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    spelling: ClassVar[Spelling] = {
        "head_dim": ("kv_channels",),
        "rope_theta": ("rotary_emb_base",),
        "partial_rotary_factor": ("rotary_pct",),
        "rms_norm_eps": ("layer_norm_epsilon",),
    }

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        self.settings.refuse("no_bias", True)
        return self.attention(context, name, qkv_bias=True)

    def intermediate_size(self) -> int:
        """The config counts the gate and what it lets through as one."""
        both = super().intermediate_size()
        if both % 2:
            raise UnsupportedModel(f"config.json: intermediate_size = {both}: must be even")
        return both // 2
