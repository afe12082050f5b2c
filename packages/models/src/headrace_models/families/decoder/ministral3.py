"""Ministral 3: Mistral whose queries grow with their position, so that long contexts stay sharp.

Mistral AI 2026, arXiv:2601.08584; the factor is Llama 4's (Meta 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.positions import query_temperature

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Ministral3ForCausalLM(LlamaDecoder):
    """Ministral 3 3B to 14B, text."""

    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.temperature = query_temperature(context)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context, name, sliding_window=window, query_temperature=self.temperature
        )
