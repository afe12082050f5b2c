"""Ouro: a stack that is passed several times, with a cache for each pass.

Zhu et al. 2025, arXiv:2510.25741. Every pass is made: the gate that would end them early is the
publisher's option, which their config leaves off.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import AttentionLayer, BuildContext

MAX_PASSES = 64


class OuroForCausalLM(LlamaDecoder):
    """Ouro 1.4B and 2.6B, base and thinking."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.input_layernorm_2", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_attention_layernorm_2", "layers.{}.mlp_out_norm"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.early_exit_gate\..*": "every pass is made"
    }

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix)
        self.settings.refuse("use_sliding_window", False)
        self.settings.refuse("early_exit_threshold", 1.0)
        passes = self.settings.integer("total_ut_steps", 4, maximum=MAX_PASSES)
        # In a tuple: their layers are those of the first pass, and loaded there.
        self.later = tuple(
            [_again(block, number) for block in self.layers] for number in range(1, passes)
        )

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.input_layernorm_2"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_attention_layernorm_2"),
        )

    def attention_layers(self) -> Mapping[str, AttentionLayer]:
        blocks = [block for stack in self.later for block in stack]
        later = [block.attention for block in blocks if isinstance(block, SandwichBlock)]
        found = {layer.spec.name: layer for layer in later if isinstance(layer, Attention)}
        return {**super().attention_layers(), **found}

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The final norm stands behind each pass; behind the last, where it always does."""
        x, residual = super().run_blocks(x, batch)
        for stack in self.later:
            x, _ = self.final_norm.add(x, residual)
            residual = None
            for block in stack:
                x, residual = block(x, residual, batch)
        return x, residual


def _again(block: Block, number: int) -> Block:
    """The block with the same weights and another cache."""
    assert isinstance(block, SandwichBlock)
    if not isinstance(block.attention, Attention):
        raise UnsupportedModel("Ouro pools with causal attention only")
    attention = copy(block.attention)
    attention.spec = replace(attention.spec, name=f"{attention.spec.name}.pass_{number}")
    repeated = copy(block)
    repeated.attention = attention
    return repeated
