"""EXAONE 4: norms behind both halves of a block, head norms, windows on three of four layers and no
positions on the fourth.

LG AI Research 2025, arXiv:2507.11407.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.families.qwen3 import HEAD_NORM_RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import PostNormBlock
from headrace_models.layers.decoder import Block

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

POST_NORM_RULES = (
    *(rule for rule in RULES if not rule.target.endswith(("input_norm", "mlp_norm"))),
    WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.attention_out_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm", "layers.{}.mlp_out_norm"),
)
"""Llama's, for blocks whose only norms stand behind both halves."""
DEFAULT_PATTERN = 4


class Exaone4ForCausalLM(LlamaForCausalLM):
    """EXAONE 4.0 32B, and 1.2B, which has no windows and positions everywhere."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*POST_NORM_RULES, *HEAD_NORM_RULES)
    default_eps: ClassVar[float] = 1e-5

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

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PostNormBlock(
            context.ops,
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_feedforward_layernorm"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window, sliding = self.settings.optional_integer("sliding_window"), self.is_sliding(index)
        return self.attention(
            context,
            name,
            rotary=self.rotary if sliding or window is None else None,
            sliding_window=window if sliding else None,
            head_norm_eps=self.norm_eps(),
        )
