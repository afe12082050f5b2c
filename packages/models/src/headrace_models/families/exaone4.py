"""EXAONE 4: OLMo 2's blocks, a norm for each head, windows on three of four layers and no
positions on the fourth.

LG AI Research 2025, arXiv:2507.11407.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_models.families.olmo2 import Olmo2ForCausalLM
from headrace_models.layers.attention import SelfAttention

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

DEFAULT_PATTERN = 4


class Exaone4ForCausalLM(Olmo2ForCausalLM):
    """EXAONE 4.0 32B, and 1.2B, which has no windows and positions everywhere."""

    def is_sliding(self, index: int) -> bool:
        """``sliding_window_pattern`` is a period, or letters, L for a layer with a window."""
        kinds = self.settings.layer_types()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        if self.settings.config.get("sliding_window") is None:
            return False
        pattern = self.settings.config.get("sliding_window_pattern")
        if not isinstance(pattern, str):
            period = self.settings.integer("sliding_window_pattern", DEFAULT_PATTERN)
            return (index + 1) % period != 0
        if not pattern or set(pattern) - {"L", "G"}:
            raise UnsupportedModel(
                f"config.json: sliding_window_pattern = {pattern!r:.200}: must be an integer, or "
                "letters L and G"
            )
        return pattern[index % len(pattern)] == "L"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window, sliding = self.settings.optional_integer("sliding_window"), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding or window is None else None,
            sliding_window=window if sliding else None,
            head_norm_eps=self.norm_eps(),
        )
