"""GPT, the first: norms behind the sums, so there is no last one.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".

Block: ``h = norm(x + attention(x)); norm(h + mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.blocks import NormedSumBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import (
    GPT2_KEYS,
    GPT2_NAMES,
    GPTDecoder,
    Names,
    without_prefix,
)
from headrace_models.layers.norm import NoNorm
from headrace_models.layers.positions import LearnedPositions

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = replace(
    GPT2_NAMES,
    embedding="transformer.tokens_embed",
    positions="transformer.positions_embed",
)
RULES = (
    *NAMES.rules(transposed=True),
    WeightRule("transformer.h.{}.ln_1", "layers.{}.attention_norm"),
)


class OpenAIGPTLMHeadModel(GPTDecoder):
    """openai-gpt, whose oldest files lack the prefix ``transformer.``."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *without_prefix(RULES))
    spelling: ClassVar[Spelling] = {**GPT2_KEYS, "hidden_act": ("afn",)}
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu"

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions:
        return self.learned_positions(context, prefix, default=512)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return NormedSumBlock(
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_mlp(context, index, name),
            self.make_norm(context, f"{name}.{self.names.mlp_norm}"),
        )

    def make_final_norm(self, context: BuildContext, prefix: str) -> NoNorm:
        return NoNorm()

    def activation(self) -> str:
        """Its ``gelu`` is the approximation by tanh: nobody had the other yet."""
        kind = super().activation()
        return "gelu_tanh" if kind == "gelu" else kind
