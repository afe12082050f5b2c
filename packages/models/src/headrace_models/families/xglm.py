"""XGLM: BioGPT's shape with positions that are computed.

Lin et al. 2021, arXiv:2112.10668.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.families.biogpt import FIRST_POSITION, BioGptForCausalLM
from headrace_models.families.biogpt import NAMES as BIOGPT_NAMES
from headrace_models.families.gpt_shape import Names
from headrace_models.layers.positions import FixedPositions
from headrace_models.settings import Spelling

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NAMES = replace(
    BIOGPT_NAMES,
    embedding="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.layer_norm",
    head="lm_head",
    positions="",
)


class XGLMForCausalLM(BioGptForCausalLM):
    """XGLM 564M to 7.5B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.embed_positions\.weights": "computed from the config"
    }
    spelling: ClassVar[Spelling] = {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("num_layers",),
        "num_attention_heads": ("attention_heads",),
        "intermediate_size": ("ffn_dim",),
        "hidden_act": ("activation_function",),
    }

    def make_positions(self, context: BuildContext, prefix: str) -> FixedPositions:
        half, odd = divmod(self.hidden_size(), 2)
        if odd or half < 2:
            raise UnsupportedModel(
                f"config.json: d_model = {self.hidden_size()}: must be even and at least 4"
            )
        step = math.log(10_000) / (half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
        return FixedPositions(context, frequencies, first=FIRST_POSITION)
