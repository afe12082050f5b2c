"""Falcon-H1: attention and Mamba 2 side by side in each layer, and a multiplier on most of what is
projected. Zuo et al. 2025, arXiv:2507.22448.

Block: ``h = x + s mamba(i norm(x)) + t attention(j norm(x)); h + mlp(norm(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import mamba2_sizes, step_limits
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer
from headrace_models.loading.rules.hybrid import FEED_FORWARD_RULES, LAYER
from headrace_models.loading.rules.mamba2 import scan_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class ParallelMixersBlock(Block):
    """``h = x + s mamba(i norm(x)) + t attention(j norm(x)); h + mlp(norm(h))``.

    Args:
        mamba_scales, attention_scales: i and s, j and t.
    """

    def __init__(
        self,
        ops: OpTable,
        input_norm: NormLayer,
        mamba: Mamba2Mixer,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mamba_scales: tuple[float, float],
        attention_scales: tuple[float, float],
    ) -> None:
        self.ops = ops
        self.input_norm = input_norm
        self.mamba = mamba
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mamba_scales, self.attention_scales = mamba_scales, attention_scales

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        scale = self.ops.scale
        before, after = self.mamba_scales
        recurrent = scale(self.mamba(scale(x, before), batch), after)
        before, after = self.attention_scales
        attended = scale(self.attention(scale(x, before), batch), after)
        x, stream = self.mlp_norm.add(self.ops.add(recurrent, attended), stream)
        return self.mlp(x), stream


class MultipliedMLP(GatedMLP):
    """``m down(silu(k gate(x)) * up(x))``.

    Args:
        multipliers: k and m.
    """

    multipliers: tuple[float, float] = (1.0, 1.0)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        ops, (opens, out) = self.gate_up.ops, self.multipliers
        inner = ops.gate(up, ops.scale(gate, opens), activation="silu")
        return ops.scale(self.down(inner), out)


class FalconH1ForCausalLM(LlamaDecoder):
    """Falcon-H1 0.5B to 34B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        WeightRule(f"{LAYER}.self_attn.q_proj", "layers.{}.attention.qkv", part=0),
        WeightRule(f"{LAYER}.self_attn.k_proj", "layers.{}.attention.qkv", part=1),
        WeightRule(f"{LAYER}.self_attn.v_proj", "layers.{}.attention.qkv", part=2),
        WeightRule(f"{LAYER}.self_attn.o_proj", "layers.{}.attention.out"),
        *scan_rules(f"{LAYER}.mamba", "layers.{}.mamba"),
        WeightRule(f"{LAYER}.pre_ff_layernorm", "layers.{}.mlp_norm"),
        *FEED_FORWARD_RULES,
        WeightRule("model.final_layernorm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    default_eps: ClassVar[float] = 1e-5

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self._multiplier("embedding"))

    def logits_multiplier(self) -> float:
        return self._multiplier("lm_head")

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.final_layernorm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ParallelMixersBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mamba(context, f"{name}.mamba"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.pre_ff_layernorm"),
            self.make_mlp(context, index, f"{name}.feed_forward"),
            (self._multiplier("ssm_in"), self._multiplier("ssm_out")),
            (self._multiplier("attention_in"), self._multiplier("attention_out")),
        )

    def make_mamba(self, context: BuildContext, name: str) -> Mamba2Mixer:
        normed = self.settings.flag("mamba_rms_norm", False)
        return Mamba2Mixer(
            context,
            name,
            mamba2_sizes(self.settings, self.hidden_size()),
            activation=self.settings.activation("hidden_act"),
            bias=self.settings.flag("mamba_proj_bias", False),
            out_bias=self.settings.flag("projectors_bias", False),
            conv_bias=self.settings.flag("mamba_conv_bias", True),
            norm_eps=self.norm_eps() if normed else None,
            norm_first=self.settings.flag("mamba_norm_before_gate", True),
            dt_limits=step_limits(self.settings),
            multipliers=self.settings.numbers("ssm_multipliers", 5) or (1.0,) * 5,
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        # A key times a number: scores times that number.
        scale = self.head_dim() ** -0.5 * self._multiplier("key")
        return self.attention(context, name, scale=scale, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        activation = self.settings.activation("hidden_act")
        if activation != "silu":
            raise UnsupportedModel(f"config.json: hidden_act is {activation}; Falcon-H1 has silu")
        mlp = MultipliedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            activation,
            bias=self.settings.flag("mlp_bias", False),
        )
        opens, out = self.settings.numbers("mlp_multipliers", 2) or (1.0, 1.0)
        mlp.multipliers = (opens, out)
        return mlp

    def _multiplier(self, what: str) -> float:
        return self.settings.number(f"{what}_multiplier", 1.0)
