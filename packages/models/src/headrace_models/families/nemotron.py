"""Nemotron-4, Minitron: LayerNorm with weights stored less 1, squared ReLU, half of each head turns.

Parmar et al. 2024, arXiv:2402.16819.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.families.arcee import ArceeForCausalLM
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class NemotronForCausalLM(ArceeForCausalLM):
    """Nemotron-4, Minitron."""

    default_partial_rotary: ClassVar[float] = 0.5

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        eps = self.settings.number("norm_eps", 1e-5)
        return LayerNorm(context, name, self.hidden_size(), eps, offset=1.0)
