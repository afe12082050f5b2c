"""Mamba 2: a stack of state-space scans by head, without attention and without MLPs. Dao and Gu 2024,
arXiv:2405.21060.

Block: ``x + mixer(norm(x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, step_limits
from headrace_models.config.settings import MAX_HEAD_DIM
from headrace_models.layers.blocks import MixerBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Sizes
from headrace_models.loading.rules.mamba import BACKBONE_RULES
from headrace_models.loading.rules.mamba2 import scan_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Mamba2ForCausalLM(Decoder):
    """Codestral-Mamba, state-spaces/mamba2."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *BACKBONE_RULES,
        *scan_rules("backbone.layers.{}.mixer"),
    )
    embedding_name: ClassVar[str] = "backbone.embeddings"
    blocks_name: ClassVar[str] = "backbone.layers"

    def make_final_norm(self, context: BuildContext, prefix: str) -> RMSNorm:
        return self.make_norm(context, f"{prefix}backbone.norm_f")

    def make_norm(self, context: BuildContext, name: str) -> RMSNorm:
        eps = self.settings.number("layer_norm_epsilon", 1e-5)
        return RMSNorm(context, name, self.hidden_size(), eps)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        norm = self.make_norm(context, f"{name}.norm")
        return MixerBlock(norm, self.make_mixer(context, f"{name}.mixer"))

    def make_mixer(self, context: BuildContext, name: str) -> Mamba2Mixer:
        sizes = Mamba2Sizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_heads", 128),
            head_dim=self.settings.integer("head_dim", 64, maximum=MAX_HEAD_DIM),
            num_groups=self.settings.integer("n_groups", 8),
            state_size=self.settings.integer("state_size", 128),
            taps=self.settings.integer("conv_kernel", 4, maximum=MAX_TAPS),
        )
        return Mamba2Mixer(
            context,
            name,
            sizes,
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("use_bias", False),
            conv_bias=self.settings.flag("use_conv_bias", True),
            norm_eps=self.settings.number("layer_norm_epsilon", 1e-5),
            dt_limits=step_limits(self.settings),
        )
