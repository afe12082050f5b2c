"""Mistral: Llama with a sliding window on every layer. Jiang et al. 2023, arXiv:2310.06825."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class MistralForCausalLM(LlamaDecoder):
    """Window ``sliding_window`` of the config, none if that is null."""

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window)
