"""Qwen3-Next and Qwen3.5, text: three gated delta nets to one layer of gated attention. Qwen Team 2025,
https://qwenlm.github.io/blog/qwen3_next.

Block: ``h = x + mixer(norm(x)); h + mlp(norm(h))``, the mixer being a delta net or attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.settings import MAX_HEAD_DIM
from headrace_models.layers.attention.gated_attention import GatedAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import HybridBlock, Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.moe import is_dense_by_step, num_experts
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import GatedExpert, SparseMoE
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.recurrent.delta_net import DeltaSizes, GatedDeltaNet
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.hybrid import LAYER
from headrace_models.loading.rules.moe import expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_DELTA, _MLP = f"{LAYER}.linear_attn", f"{LAYER}.mlp"
KINDS = ("linear_attention", "full_attention")

SHARED_RULES = (
    WeightRule("model.embed_tokens", "embed"),
    WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
    WeightRule(
        f"{LAYER}.self_attn.q_proj", "layers.{}.mixer.qkv",
        split=ALL_PARTS, order=(0, 1), groups=EACH_KV_HEAD,
    ),
    WeightRule(f"{LAYER}.self_attn.k_proj", "layers.{}.mixer.qkv", part=2),
    WeightRule(f"{LAYER}.self_attn.v_proj", "layers.{}.mixer.qkv", part=3),
    WeightRule(f"{LAYER}.self_attn.o_proj", "layers.{}.mixer.out"),
    WeightRule(f"{LAYER}.self_attn.q_norm", "layers.{}.mixer.query_norm"),
    WeightRule(f"{LAYER}.self_attn.k_norm", "layers.{}.mixer.key_norm"),
    WeightRule(f"{_DELTA}.conv1d", "layers.{}.mixer.conv", split=ALL_PARTS),
    WeightRule(f"{_DELTA}.A_log", "layers.{}.mixer.rule.A_log"),
    WeightRule(f"{_DELTA}.dt_bias", "layers.{}.mixer.rule.dt_bias"),
    WeightRule(f"{_DELTA}.norm", "layers.{}.mixer.norm"),
    WeightRule(f"{_DELTA}.out_proj", "layers.{}.mixer.out_proj"),
    WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
    WeightRule(f"{_MLP}.gate_proj", "layers.{}.mlp.gate_up", part=0),
    WeightRule(f"{_MLP}.up_proj", "layers.{}.mlp.gate_up", part=1),
    WeightRule(f"{_MLP}.down_proj", "layers.{}.mlp.down"),
    WeightRule("model.norm", "final_norm"),
    WeightRule("lm_head", "head"),
)  # fmt: skip
"""Rules of Qwen3-Next and Qwen3.5, without the inputs of the delta nets and without experts."""

MIXTURE_RULES = (
    *router_rules(),
    *expert_rules(),
    WeightRule(f"{_MLP}.shared_expert.gate_proj", "layers.{}.mlp.shared.experts.0.gate_up", part=0),
    WeightRule(f"{_MLP}.shared_expert.up_proj", "layers.{}.mlp.shared.experts.0.gate_up", part=1),
    WeightRule(f"{_MLP}.shared_expert.down_proj", "layers.{}.mlp.shared.experts.0.down"),
    WeightRule(f"{_MLP}.shared_expert_gate", "layers.{}.mlp.shared.router"),
)


class Qwen3_5ForCausalLM(LlamaDecoder):
    """Qwen3.5, dense. A quarter of each head turns, norms are stored less 1."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *SHARED_RULES,
        WeightRule(
            f"{_DELTA}.in_proj_qkv", "layers.{}.mixer.inputs", split=ALL_PARTS, order=(0, 1, 2)
        ),
        WeightRule(f"{_DELTA}.in_proj_z", "layers.{}.mixer.inputs", part=3),
        WeightRule(f"{_DELTA}.in_proj_b", "layers.{}.mixer.gates", part=0),
        WeightRule(f"{_DELTA}.in_proj_a", "layers.{}.mixer.gates", part=1),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"mtp\..*": "a head that predicts several tokens",
        r"model\.visual\..*": "the eyes of the model with images",
    }
    default_partial_rotary: ClassVar[float] = 0.25

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def head_dim(self) -> int:
        return self.settings.head_dim(256)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, name),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, f"{name}.self_attn")
        sizes = DeltaSizes(
            hidden_size=self.hidden_size(),
            num_key_heads=self.settings.integer("linear_num_key_heads", 16),
            num_value_heads=self.settings.integer("linear_num_value_heads", 32),
            key_dim=self.settings.integer("linear_key_head_dim", 128, maximum=MAX_HEAD_DIM),
            value_dim=self.settings.integer("linear_value_head_dim", 128, maximum=MAX_HEAD_DIM),
            taps=self.settings.integer("linear_conv_kernel_dim", 4, maximum=MAX_TAPS),
        )
        activation = self.settings.activation("hidden_act")
        return GatedDeltaNet(
            context, f"{name}.linear_attn", sizes, activation=activation, norm_eps=self.norm_eps()
        )

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention."""
        kinds = layer_kinds(self.settings, "layer_types", known=KINDS, count=self.num_layers())
        if kinds is not None:
            return kinds[index] == "full_attention"
        return (index + 1) % self.settings.integer("full_attention_interval", 4) == 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return GatedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            rotary=self.rotary,
            head_norm_eps=self.norm_eps(),
            head_norm_offset=1.0,
            qkv_bias=bias,
            out_bias=bias,
        )


def experts(
    decoder: Qwen3_5ForCausalLM, context: BuildContext, name: str, *, renormalise: bool
) -> SparseMoE:
    """The mixture ``name``, beside which a gated expert takes all tokens.

    Args:
        renormalise: True: the chosen experts' weights are divided by their sum.
    """
    settings, hidden = decoder.settings, decoder.hidden_size()
    activation = settings.activation("hidden_act")
    return SparseMoE(
        context,
        name,
        hidden_size=hidden,
        intermediate_size=settings.integer("moe_intermediate_size"),
        routing=Routing(
            num_experts=num_experts(settings),
            top_k=settings.integer("num_experts_per_tok"),
            renormalise=renormalise,
        ),
        activation=activation,
        shared=GatedExpert(
            context,
            f"{name}.shared_expert",
            f"{name}.shared_expert_gate",
            hidden,
            settings.integer("shared_expert_intermediate_size"),
            activation,
        ),
    )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with mixtures of experts in place of the MLPs."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *Qwen3_5ForCausalLM.weight_rules,
        *MIXTURE_RULES,
    )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return experts(self, context, name, renormalise=True)


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3-Next 80B-A3B. What goes into a delta net is stored key head by key head."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *SHARED_RULES,
        *MIXTURE_RULES,
        WeightRule(
            f"{_DELTA}.in_proj_qkvz", "layers.{}.mixer.inputs", split=ALL_PARTS, groups=EACH_KV_HEAD
        ),
        WeightRule(
            f"{_DELTA}.in_proj_ba", "layers.{}.mixer.gates", split=ALL_PARTS, groups=EACH_KV_HEAD
        ),
    )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if is_dense_by_step(self.settings, index):
            return super().make_mlp(context, index, name)
        renormalise = self.settings.flag("norm_topk_prob", True)
        return experts(self, context, name, renormalise=renormalise)
