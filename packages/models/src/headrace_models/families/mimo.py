"""MiMo: Qwen 2 whose checkpoints bring layers that guess further tokens.

Xiaomi 2025, arXiv:2505.07608.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headrace_models.families.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo 7B."""

    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.mtp_layers\..*": "guesses further tokens, which is speculation's business"
    }
