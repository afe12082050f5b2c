"""Orion: Llama with LayerNorm.

OrionStar 2024, arXiv:2401.12246.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class OrionForCausalLM(LlamaDecoder):
    """Orion 14B."""

    default_eps: ClassVar[float] = 1e-5

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps())
