"""GPT-2 and Cerebras-GPT: learned positions, LayerNorm, ungated MLP, transposed weights.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gpt_shape import GPT2_KEYS, GPTDecoder, Names
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.positions import LearnedPositions
from headrace_models.settings import Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_norm="ln_1",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    positions="transformer.wpe",
)


def without_prefix(rules: Sequence[WeightRule], prefix: str = "transformer.") -> list[WeightRule]:
    """The rules of names with a prefix, for names that lack it."""
    return [
        replace(rule, source=rule.source.removeprefix(prefix))
        for rule in rules
        if rule.source.startswith(prefix)
    ]


class GPT2LMHeadModel(GPTDecoder):
    """The hub's oldest GPT-2 files lack the prefix ``transformer.``."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(transposed=True),
        *without_prefix(NAMES.rules(transposed=True)),
    )
    spelling: ClassVar[Spelling] = GPT2_KEYS
    ties_embeddings: ClassVar[bool] = True

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions | None:
        return self.learned_positions(context, prefix, default=1024)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context, name, scale=self.score_scale(index), qkv_bias=True, out_bias=True
        )

    def score_scale(self, index: int) -> float:
        """What the scores of layer ``index`` are multiplied by."""
        scaled = self.settings.flag("scale_attn_weights", True)
        scale = self.settings.head_dim() ** -0.5 if scaled else 1.0
        by_layer = self.settings.flag("scale_attn_by_inverse_layer_idx", False)
        return scale / (index + 1) if by_layer else scale
