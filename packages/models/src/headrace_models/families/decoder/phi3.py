"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, partial rotary, LongRoPE.

Abdin et al. 2024, arXiv:2404.14219. Which of LongRoPE's two sets of factors is used is decided
once, by ``max_model_len``: see :func:`headrace_models.layers.rotary.rotary_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Phi3ForCausalLM(LlamaDecoder):
    """Phi-3 (mini, medium), Phi-4."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if not rule.target.endswith((".qkv", ".gate_up"))),
        WeightRule(
            "model.layers.{}.self_attn.qkv_proj", "layers.{}.attention.qkv", split=ALL_PARTS
        ),
        WeightRule("model.layers.{}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
    )
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = self.settings.optional_integer("sliding_window")
        return self.attention(context, name, sliding_window=window, part_names=())

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            stored_fused=True,
        )
