"""Tele-FLM: Llama with the multipliers of µP on embeddings and logits.

Li et al. 2024, arXiv:2404.16645.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from torch import Tensor


class TeleFLMForCausalLM(LlamaDecoder):
    """Tele-FLM 52B and its descendants, with ``use_mup``; without, it is Llama."""

    def is_scaled(self) -> bool:
        return self.settings.flag("use_mup", False)

    def token_vectors(self, ids: Tensor) -> Tensor:
        vectors = self.embed(ids)
        if not self.is_scaled():
            return vectors
        return self.context.ops.scale(vectors, self.settings.number("input_mult", 1.0))

    def logits_multiplier(self) -> float:
        if not self.is_scaled():
            return 1.0
        width = self.settings.positive("mup_scale_factor", 1.0)
        return self.settings.number("output_mult", 1.0) / width
