"""Jamba: Mamba with a layer of attention in eight and a mixture of experts in two. Lieber et al. 2024,
arXiv:2403.19887.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being Mamba or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.recurrent.mamba import MambaMixer, MambaSizes
from headrace_models.loading.rules.hybrid import ATTENTION_RULES, FEED_FORWARD_RULES, LAYER
from headrace_models.loading.rules.mamba import scan_rules
from headrace_models.loading.rules.moe import expert_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

STEP_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class JambaForCausalLM(LlamaDecoder):
    """Jamba 1.0 to 1.7. Positions are known from the recurrences alone."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        *ATTENTION_RULES,
        *scan_rules(f"{LAYER}.mamba"),
        *(
            WeightRule(f"{LAYER}.mamba.{norm}", f"layers.{{}}.mixer.norms.{index}")
            for index, norm in enumerate(STEP_NORMS)
        ),
        WeightRule(f"{LAYER}.pre_ff_layernorm", "layers.{}.mlp_norm"),
        *FEED_FORWARD_RULES,
        WeightRule(f"{LAYER}.feed_forward.router", "layers.{}.mlp.router"),
        *expert_rules(f"{LAYER}.feed_forward.experts"),
        WeightRule("model.final_layernorm", "final_norm"),
        WeightRule("lm_head", "head"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary = None

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
        return self._is_turn(index, "attn_layer", 8, 4)

    def make_mamba(self, context: BuildContext, name: str) -> Mixer:
        hidden, eps = self.hidden_size(), self.norm_eps()
        rank = self.context.config.get("mamba_dt_rank", "auto")
        sizes = MambaSizes(
            hidden_size=hidden,
            channels=self.settings.integer("mamba_expand", 2) * hidden,
            state_size=self.settings.integer("mamba_d_state", 16),
            step_rank=-(-hidden // 16)
            if rank == "auto"
            else self.settings.integer("mamba_dt_rank"),
            taps=self.settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
        )
        lengths = (sizes.step_rank, sizes.state_size, sizes.state_size)
        return MambaMixer(
            context,
            name,
            sizes,
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("mamba_proj_bias", False),
            conv_bias=self.settings.flag("mamba_conv_bias", True),
            norms=[
                RMSNorm(context, f"{name}.{norm}", length, eps)
                for norm, length in zip(STEP_NORMS, lengths)
            ],
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        experts = self.settings.integer("num_experts", 16, maximum=MAX_EXPERTS)
        if experts == 1 or not self._is_turn(index, "expert_layer", 2, 1):
            return super().make_mlp(context, index, name)
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(experts, self.settings.integer("num_experts_per_tok", 2)),
            activation=self.settings.activation("hidden_act"),
            router_name="router",
        )

    def _is_turn(self, index: int, what: str, period: int, offset: int) -> bool:
        """True if it is the layer's turn, once in a period."""
        period = self.settings.integer(f"{what}_period", period)
        return index % period == self.settings.integer(f"{what}_offset", offset, minimum=0)
