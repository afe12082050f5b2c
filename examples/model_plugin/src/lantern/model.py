"""Lantern: Llama, whose input vectors are multiplied with a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.families.decoder.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from torch import Tensor


class LanternForCausalLM(LlamaForCausalLM):
    """``embedding_multiplier`` of the config stands before the first block."""

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * self.settings.positive("embedding_multiplier")
