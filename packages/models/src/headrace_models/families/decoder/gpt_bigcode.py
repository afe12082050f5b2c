"""StarCoder 1, SantaCoder: GPT-2 whose heads share one key and value, weights not transposed.

Shazeer 2019, arXiv:1911.02150 (multi-query attention); Allal et al. 2023, arXiv:2301.03988.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import (
    GPT2_KEYS,
    GPT2_NAMES,
    GPTDecoder,
    Names,
    gpt2_score_scale,
)
from headrace_models.layers.positions import LearnedPositions

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class GPTBigCodeForCausalLM(GPTDecoder):
    """One key-value head; or, without ``multi_query``, one for each query head, stored head by head. Its
    blocks are :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = GPT2_NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = GPT2_NAMES.rules(groups=EACH_KV_HEAD)
    spelling: ClassVar[Spelling] = GPT2_KEYS
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu_pytorch_tanh"

    def num_kv_heads(self) -> int:
        shared = self.settings.flag("multi_query", True)
        return 1 if shared else self.settings.integer("num_attention_heads")

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions | None:
        return self.learned_positions(context, prefix, default=1024)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        scale = gpt2_score_scale(self.settings, index)
        return self.attention(context, name, scale=scale, qkv_bias=True, out_bias=True)
