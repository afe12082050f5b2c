"""Granite with windows on three of four layers, attention sinks, and a rotary base for each layer.

IBM 2026; sinks as a logit for each head: OpenAI 2025, arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.granite import GraniteForCausalLM
from headrace_models.families.llama import RULES
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import rope_settings, scaling_block

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

FULL_EVERY = 4
"""Without ``layer_types``, the first of every four layers has no window."""


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Granite 4.1 dense."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.self_attn.sinks", "layers.{}.attention.sinks.weight"),
    )
    ties_embeddings: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        own = rope_settings(context.config).theta
        self.thetas = self.settings.numbers("layer_rope_theta", self.num_layers()) or (
            [own] * self.num_layers()
        )
        bases = {own, *(theta for theta in self.thetas if theta)}
        self.tables = {theta: self._table(context, theta) for theta in sorted(bases)}
        self.rotary = self.tables[own]

    def _table(self, context: BuildContext, theta: float) -> Tensor:
        block = {**scaling_block(context.config), "rope_theta": theta}
        rope = rope_settings({**context.config, "rope_scaling": None, "rope_parameters": block})
        limit = self.settings.integer("max_position_embeddings", 8192)
        return rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def is_sliding(self, index: int) -> bool:
        kinds = self.settings.layer_types()
        return index % FULL_EVERY != 0 if kinds is None else kinds[index] == "sliding_attention"

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """A base of 0 stands for no positions."""
        bias = self.settings.flag("attention_bias", False)
        window = self.settings.optional_integer("sliding_window")
        return self.attention(
            context,
            name,
            rotary=self.tables.get(self.thetas[index]),
            scale=self.score_multiplier(),
            sliding_window=window if self.is_sliding(index) else None,
            sinks=True,
            qkv_bias=bias,
            out_bias=bias,
        )
