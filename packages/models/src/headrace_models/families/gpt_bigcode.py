"""StarCoder 1, SantaCoder: GPT-2 whose heads share one key and value, weights not transposed.

Shazeer 2019, arXiv:1911.02150 (multi-query attention); Allal et al. 2023, arXiv:2301.03988.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.families.gpt2 import NAMES, GPT2LMHeadModel


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """One key-value head; or, without ``multi_query``, one for each query head, stored head by head."""

    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules(groups=EACH_KV_HEAD)
    default_activation: ClassVar[str | None] = "gelu_pytorch_tanh"

    def num_kv_heads(self) -> int:
        shared = self.settings.flag("multi_query", True)
        return 1 if shared else self.settings.integer("num_attention_heads")
