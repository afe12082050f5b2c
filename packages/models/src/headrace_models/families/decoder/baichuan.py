"""Baichuan 1 and 2: Llama with query, key and value in one tensor; 13B has ALiBi, 2 a normalised head.

Baichuan Inc. 2023, arXiv:2309.10305.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.renamed_llama import Names, RenamedLlama
from headrace_models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(qkv=("W_pack",))
VOCABULARY_OF_2 = 125_696
"""Nothing else in their configs tells Baichuan 2 from 1."""


class NormalisedLinear(Linear):
    """A layer that multiplies with its weight's rows divided by their lengths.

    They are divided once, at load; a weight that comes in integers is taken as it is.
    """

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors.get("weight")
        if weight is not None and weight.is_floating_point():
            rows = torch.nn.functional.normalize(weight.float()).to(weight.dtype)
            tensors = {**tensors, "weight": rows}
        super().load(tensors)


class BaichuanForCausalLM(RenamedLlama):
    """The config of 7B says how many positions it was trained on, that of 13B does not: it has none."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()

    def has_alibi(self) -> bool:
        return self.settings.config.get("max_position_embeddings") is None

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if not self.has_alibi():
            return self.attention(context, name)
        slopes = alibi_slopes(self.settings.integer("num_attention_heads"))
        return self.attention(context, name, rotary=None, alibi_slopes=slopes)

    def head_class(self) -> type[Linear]:
        is_second = self.settings.integer("vocab_size") == VOCABULARY_OF_2
        return NormalisedLinear if is_second else Linear
