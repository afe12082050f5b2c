"""SmolLM3: Llama without positions on every fourth layer.

Hugging Face 2025; layers without positions: Yang et al. 2025, arXiv:2501.18795.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

NO_POSITIONS_EVERY = 4


class SmolLM3ForCausalLM(LlamaDecoder):
    """SmolLM3 3B."""

    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 2_000_000.0

    def has_positions(self, index: int) -> bool:
        """``no_rope_layers`` holds 1 for layers that do have positions."""
        marks = self.settings.marks("no_rope_layers", self.num_layers())
        if marks is not None:
            return marks[index]
        every = self.settings.integer("no_rope_layer_interval", NO_POSITIONS_EVERY)
        return (index + 1) % every != 0

    def window(self, index: int) -> int | None:
        """The window of layers without positions, if windows are used and no ``layer_types`` say else."""
        if not self.settings.flag("use_sliding_window", False):
            return None
        kinds = self.settings.layer_types()
        sliding = (
            not self.has_positions(index) if kinds is None else kinds[index] == "sliding_attention"
        )
        return self.settings.optional_integer("sliding_window") if sliding else None

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return self.attention(
            context,
            name,
            rotary=self.rotary if self.has_positions(index) else None,
            sliding_window=self.window(index),
            qkv_bias=bias,
            out_bias=bias,
        )
