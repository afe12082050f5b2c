"""CodeGen 1: GPT-J with query, value and key in one tensor, cut in four for the cores it was trained on.

Nijkamp et al. 2022, arXiv:2203.13474.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gpt_shape import Names
from headrace_models.families.gptj import NAMES as GPTJ_NAMES
from headrace_models.families.gptj import GPTJForCausalLM

NAMES = replace(GPTJ_NAMES, qkv=("qkv_proj",))
CORES = 4


class CodeGenForCausalLM(GPTJForCausalLM):
    """CodeGen 350M to 16B, nl, multi and mono."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules(groups=CORES, order=(0, 2, 1))
