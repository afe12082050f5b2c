"""Jamba: Mamba with a layer of attention in eight and a mixture of experts in two. Lieber et al. 2024,
arXiv:2403.19887."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.bamba import (
    ATTENTION_RULES,
    FEED_FORWARD_RULES,
    LAYER,
    BambaForCausalLM,
)
from headrace_models.families.mamba import scan_rules
from headrace_models.families.moe_rules import expert_rules
from headrace_models.layers.hybrid_block import Mixer
from headrace_models.layers.mamba import MambaMixer, MambaSizes
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.router import Routing
from headrace_models.recurrent_settings import MAX_TAPS
from headrace_models.settings import MAX_EXPERTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

STEP_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class JambaForCausalLM(BambaForCausalLM):
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
    default_eps: ClassVar[float] = 1e-6

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary = None

    def attends(self, index: int) -> bool:
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
        """Whether the layer is one in a period."""
        period = self.settings.integer(f"{what}_period", period)
        return index % period == self.settings.integer(f"{what}_offset", offset, minimum=0)
