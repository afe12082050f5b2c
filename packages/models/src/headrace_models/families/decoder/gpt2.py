"""GPT-2 and Cerebras-GPT: learned positions, LayerNorm, an MLP without a gate, transposed weights.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import (
    GPT2_KEYS,
    GPT2_NAMES,
    GPTDecoder,
    Names,
    gpt2_score_scale,
    without_prefix,
)
from headrace_models.layers.positions import LearnedPositions

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class GPT2LMHeadModel(GPTDecoder):
    """The hub's oldest GPT-2 files lack the prefix ``transformer.``. Its blocks are
    :class:`~headrace_models.layers.blocks.PreNormBlock`."""

    names: ClassVar[Names] = GPT2_NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *GPT2_NAMES.rules(transposed=True),
        *without_prefix(GPT2_NAMES.rules(transposed=True)),
    )
    spelling: ClassVar[Spelling] = GPT2_KEYS
    ties_embeddings: ClassVar[bool] = True

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions | None:
        return self.learned_positions(context, prefix, default=1024)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        scale = gpt2_score_scale(self.settings, index)
        return self.attention(context, name, scale=scale, qkv_bias=True, out_bias=True)
