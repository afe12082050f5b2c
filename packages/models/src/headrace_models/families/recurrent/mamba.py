"""Mamba: a stack of selective scans, without attention and without MLPs. Gu and Dao 2023,
arXiv:2312.00752.

Block: ``x + mixer(norm(x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS
from headrace_models.layers.blocks import MixerBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.recurrent.mamba import MambaMixer, MambaSizes
from headrace_models.loading.rules.mamba import BACKBONE_RULES, scan_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class MambaForCausalLM(Decoder):
    """state-spaces/mamba-130m-hf to 2.8b-hf."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *BACKBONE_RULES,
        *scan_rules("backbone.layers.{}.mixer"),
    )
    ties_embeddings: ClassVar[bool] = True
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

    def make_mixer(self, context: BuildContext, name: str) -> MambaMixer:
        sizes = self.sizes()
        return MambaMixer(
            context,
            name,
            sizes,
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("use_bias", False),
            conv_bias=self.settings.flag("use_conv_bias", True),
            norms=self.make_step_norms(context, name, sizes),
        )

    def make_step_norms(
        self, context: BuildContext, name: str, sizes: MambaSizes
    ) -> Sequence[RMSNorm]:
        """Norms of step, key and query, if the family has them."""
        return ()

    def sizes(self) -> MambaSizes:
        """Sizes of the mixers."""
        hidden = self.hidden_size()
        rank = self.context.config.get("time_step_rank", "auto")
        channels = int(self.settings.positive("expand", 2) * hidden)
        return MambaSizes(
            hidden_size=hidden,
            channels=self.settings.integer("intermediate_size", channels),
            state_size=self.settings.integer("state_size", 16),
            step_rank=-(-hidden // 16)
            if rank == "auto"
            else self.settings.integer("time_step_rank"),
            taps=self.settings.integer("conv_kernel", 4, maximum=MAX_TAPS),
        )


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon-Mamba: steps, keys and queries are normed before the scan. Zuo et al. 2024,
    arXiv:2410.05355."""

    def make_step_norms(
        self, context: BuildContext, name: str, sizes: MambaSizes
    ) -> Sequence[RMSNorm]:
        eps = self.settings.number("mixer_rms_eps", 1e-6)
        lengths = (sizes.step_rank, sizes.state_size, sizes.state_size)
        return [RMSNorm(context, name, length, eps, weight=False) for length in lengths]
