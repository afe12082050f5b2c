"""CWM: Llama 3 with windows on three of four layers. FAIR CodeGen team 2025, arXiv:2510.02387."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

FULL_EVERY = 4
"""Without ``layer_types``, the first of every four layers has no window."""


class CwmForCausalLM(LlamaDecoder):
    """Code World Model."""

    default_theta: ClassVar[float] = 1_000_000.0
    default_eps: ClassVar[float] = 1e-5

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        return index % FULL_EVERY != 0 if kinds is None else kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context, name, sliding_window=window if self.is_sliding(index) else None
        )
