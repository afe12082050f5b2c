"""The language model of Bagel: Qwen 2 with norms over each query and key head. Of its two sets of layers, the
one that understands; that which draws is not read.

Deng et al. 2025, arXiv:2505.14683.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention


class BagelTextForCausalLM(LlamaDecoder):
    """The published code has the norms whatever the config says of them."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *HEAD_NORM_RULES)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        self.settings.refuse("use_sliding_window", False)
        eps = self.settings.number("rms_norm_eps", 1e-6)
        return self.attention(context, name, qkv_bias=True, head_norm_eps=eps)
