"""Persimmon: Phi's head norms with a fused projection stored head by head, squared ReLU.

Elsen et al. 2023, "Releasing Persimmon-8B".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.families.gpt_shape import Names
from headrace_models.families.phi import HEAD_NORM_RULES, HeadNormedDecoder
from headrace_models.families.phi import NAMES as PHI_NAMES

NAMES = replace(
    PHI_NAMES,
    qkv=("query_key_value",),
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


class PersimmonForCausalLM(HeadNormedDecoder):
    """Persimmon 8B, and the text model of Fuyu."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *NAMES.rules(groups=EACH_KV_HEAD),
        *HEAD_NORM_RULES,
    )
    default_theta: ClassVar[float] = 25_000.0
    default_activation: ClassVar[str | None] = "relu2"
