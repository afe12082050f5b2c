"""Bamba: Mamba 2 with some layers of attention, and an MLP in each. Ganti et al. 2024,
https://huggingface.co/blog/bamba.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being Mamba 2 or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import mamba2_sizes, step_limits
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer
from headrace_models.loading.rules.hybrid import ATTENTION_RULES, FEED_FORWARD_RULES, LAYER
from headrace_models.loading.rules.mamba2 import scan_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class BambaForCausalLM(LlamaDecoder):
    """Bamba 9B. Half of each head turns; ``attn_layer_indices`` says which layers attend."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        *ATTENTION_RULES,
        *scan_rules(f"{LAYER}.mamba"),
        WeightRule(f"{LAYER}.pre_ff_layernorm", "layers.{}.mlp_norm"),
        *FEED_FORWARD_RULES,
        WeightRule("model.final_layernorm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    default_partial_rotary: ClassVar[float] = 0.5
    default_eps: ClassVar[float] = 1e-5

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.final_layernorm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, name),
            self.make_norm(context, f"{name}.pre_ff_layernorm"),
            self.make_mlp(context, index, f"{name}.feed_forward"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, f"{name}.self_attn")
        return self.make_mamba(context, f"{name}.mamba")

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention."""
        return index in self.settings.integers("attn_layer_indices")

    def make_mamba(self, context: BuildContext, name: str) -> Mixer:
        return Mamba2Mixer(
            context,
            name,
            mamba2_sizes(self.settings, self.hidden_size()),
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("mamba_proj_bias", False),
            conv_bias=self.settings.flag("mamba_conv_bias", True),
            norm_eps=self.norm_eps(),
            dt_limits=step_limits(self.settings),
        )
